"""Dependencies: minimum versions without known vulnerabilities, and a lock with hashes."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

# The oldest release without a known hole, and one just before it.
FLOORS = {
    "bentoml": ("1.4.39", "1.4.38"),
    "torch": ("2.10", "2.9.1"),
    "pytorch-lightning": ("2.6.6", "2.6.5"),
    "onnx": ("1.21", "1.20.1"),
    "deepspeed": ("0.15.1", "0.15.0"),
    "starlette": ("0.49.1", "0.49.0"),
    "python-multipart": ("0.0.26", "0.0.25"),
    "pillow": ("12.2", "12.1.1"),
    "pyarrow": ("23.0.1", "23.0.0"),
}
POISONED = {"lightning": ("2.6.2", "2.6.3"), "pytorch-lightning": ("2.6.2", "2.6.3")}


@pytest.fixture(name="project")
def _project(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text())


@pytest.fixture(name="lock")
def _lock(root: Path) -> str:
    return (root / "requirements.lock").read_text()


def declared(project: dict[str, Any]) -> list[Requirement]:
    """Every requirement of the project and its extras, without serve-cpu and the project itself."""
    extras = project["project"]["optional-dependencies"]
    found = [
        Requirement(text)
        for text in [
            *project["project"]["dependencies"],
            *(text for name, extra in extras.items() if name != "serve-cpu" for text in extra),
        ]
    ]
    return [one for one in found if one.name != project["project"]["name"]]


def locked(lock: str) -> dict[str, list[Version]]:
    """Versions by name; more than one where they differ by platform or Python."""
    found: dict[str, list[Version]] = {}
    for name, version in re.findall(r"^([a-z0-9._-]+)==([^\s;\\]+)", lock, re.MULTILINE):
        found.setdefault(name, []).append(Version(version))
    return found


def allows(requirements: list[Requirement], name: str, version: str) -> bool:
    return all(
        requirement.specifier.contains(version)
        for requirement in requirements
        if requirement.name == name
    )


def test_the_extras_are_those_of_the_readme_and_contribution_guide(project: dict[str, Any]) -> None:
    assert set(project["project"]["optional-dependencies"]) == {
        "train",
        "client",
        "files",
        "ray",
        "loggers",
        "tokens",
        "encoders",
        "export",
        "serve",
        "serve-cpu",
        "service",
        "grpc",
        "tracing",
        "postgres",
        "sign",
        "weights",
        "gpu",
        "dev",
    }


def test_the_two_extras_of_the_service_differ_in_their_runtime_and_are_declared_a_conflict(
    project: dict[str, Any],
) -> None:
    extras = project["project"]["optional-dependencies"]
    both = [{Requirement(text).name for text in extras[name]} for name in ("serve", "serve-cpu")]
    assert both[0] - both[1] == {"onnxruntime-gpu"}
    assert "slipway-ml" in both[0] & both[1]
    assert project["tool"]["uv"]["conflicts"] == [[{"extra": "serve"}, {"extra": "serve-cpu"}]]


def test_the_lock_for_cpus_lacks_only_what_torch_imports_without(root: Path, lock: str) -> None:
    for_cpus = locked((root / "requirements.cpu.lock").read_text())
    everything = locked(lock)
    assert {name: everything[name] for name in for_cpus} == for_cpus
    makefile = (root / "Makefile").read_text()
    (left_out,) = re.findall(r"^ONLY_ON_A_GPU = (.+)$", makefile, re.MULTILINE)
    assert set(everything) - set(for_cpus) == set(left_out.split())


@pytest.mark.parametrize("name", FLOORS)
def test_the_lock_is_at_or_above_each_security_floor(name: str, lock: str) -> None:
    assert min(locked(lock)[name]) >= Version(FLOORS[name][0])


@pytest.mark.parametrize("name", FLOORS)
def test_a_release_below_the_floor_is_not_allowed(name: str, project: dict[str, Any]) -> None:
    assert not allows(declared(project), name, FLOORS[name][1])


def test_the_poisoned_releases_are_excluded(project: dict[str, Any]) -> None:
    requirements = [
        *declared(project),
        *map(Requirement, project["tool"]["uv"]["constraint-dependencies"]),
    ]
    for name, versions in POISONED.items():
        assert [version for version in versions if allows(requirements, name, version)] == []


def test_a_poisoned_release_would_be_noticed() -> None:
    assert allows([Requirement("lightning>=2.6")], "lightning", "2.6.3")


@pytest.mark.parametrize("name", ["requirements.lock", "requirements.cpu.lock"])
def test_every_locked_package_has_a_hash(root: Path, name: str) -> None:
    lock = (root / name).read_text()
    blocks = re.split(r"\n(?=[a-z0-9])", lock[lock.index("\n", lock.index("make lock")) + 1 :])
    assert [block.splitlines()[0] for block in blocks if "--hash=sha256:" not in block] == []


def test_the_lock_covers_every_requirement_but_the_gpu_extra(
    project: dict[str, Any], lock: str
) -> None:
    on_gpu = {Requirement(text).name for text in project["project"]["optional-dependencies"]["gpu"]}
    needed = {requirement.name for requirement in declared(project)} - on_gpu
    assert needed - set(locked(lock)) == set()


def test_the_lock_names_no_place_of_one_machine(lock: str) -> None:
    assert [
        line for line in lock.splitlines() if "://" in line or line.startswith(("-", "/"))
    ] == []


PYTHONS = ("3.11", "3.12", "3.13", "3.14")


def test_every_supported_python_finds_each_locked_package_once(
    project: dict[str, Any], lock: str
) -> None:
    supported = Requirement(f"slipway{project['project']['requires-python']}").specifier
    assert [python for python in ("3.10", *PYTHONS, "3.15") if supported.contains(python)] == [
        *PYTHONS
    ]
    lines = [line.rstrip(" \\") for line in lock.splitlines() if re.match(r"[a-z0-9]", line)]
    for python in PYTHONS:
        machine = {
            "python_version": python,
            "python_full_version": f"{python}.0",
            "sys_platform": "linux",
            "platform_machine": "x86_64",
        }
        here = [
            one.name
            for one in map(Requirement, lines)
            if one.marker is None or one.marker.evaluate(machine)
        ]
        assert len(here) == len(set(here)), python
        needed = {
            one.name
            for one in declared(project)
            if one.marker is None or one.marker.evaluate(machine)
        }
        on_gpu = {
            Requirement(text).name for text in project["project"]["optional-dependencies"]["gpu"]
        }
        assert needed - on_gpu <= set(here), python
