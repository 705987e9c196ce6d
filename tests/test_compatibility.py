"""docs/reference/compatibility.md has the numbers of pyproject.toml, the locks and the code."""

import ast
import json
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from slipway.artifacts.bundle import load_bundle
from slipway.artifacts.certificate import read_certificate
from slipway.drift.reference import parse_references
from slipway.system.errors import BundleError, CertificateError
from tests.launch.test_kubernetes import OLDEST
from tests.structure.tracked import tracked_files

pytestmark = pytest.mark.unit
ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/reference/compatibility.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = (ROOT / "requirements.lock").read_text()
_CONSTANTS = ("FORMAT_VERSION", "_FORMAT")


def rows(page: str, title: str) -> list[list[str]]:
    """Return the cells of the table below the heading `title`, without its header."""
    section = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def required() -> set[str]:
    """Every requirement of the package and of its extras, without the marker."""
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    return {requirement.partition(";")[0].strip() for group in groups for requirement in group}


def package_faults(page: str) -> list[str]:
    """List the requirements and tested versions of the page that differ from the project's."""
    found = []
    for _, accepted, tested in rows(page, "Packages"):
        (requirement,) = quoted(accepted)
        if requirement not in required():
            found.append(f"{requirement} is not in pyproject.toml")
        name = re.split(r"[<>=!]", requirement)[0]
        locked = re.findall(rf"^{re.escape(name)}==(\S+)", LOCK, flags=re.MULTILINE)
        if quoted(tested) != locked:
            found.append(f"{name} {quoted(tested)} is {locked} in requirements.lock")
    return found


@cache
def formats_in_code() -> dict[str, str]:
    """The format versions that each module declares, such as "1, 2"."""
    found = {}
    for path in tracked_files(ROOT, (".py",)):
        if path.startswith("slipway/") and (numbers := set(declared((ROOT / path).read_text()))):
            found[path] = ", ".join(sorted(numbers))
    return found


def declared(source: str) -> Iterator[str]:
    if not any(name in source for name in ("format_version", *_CONSTANTS)):
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "format_version":
            yield from re.findall(r"\d+", ast.unparse(node.annotation))
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in _CONSTANTS:
            yield ast.unparse(node.value)


def format_faults(page: str, in_code: dict[str, str]) -> list[str]:
    """List the modules whose format versions are missing or wrong on the page."""
    named = {quoted(code)[0]: quoted(version)[0] for _, version, code, _ in rows(page, "Formats")}
    return [
        f"{module}: {named.get(module)} on the page, {in_code.get(module)} in the code"
        for module in sorted({*named, *in_code})
        if named.get(module) != in_code.get(module)
    ]


def test_the_packages_are_those_of_the_project_and_its_lock() -> None:
    assert package_faults(PAGE) == []


def test_the_formats_are_those_of_the_code() -> None:
    assert format_faults(PAGE, formats_in_code()) == []


def test_the_platforms_are_those_of_the_project_and_its_tests() -> None:
    cells = {
        name: (quoted(accepted), quoted(tested))
        for name, accepted, tested in rows(PAGE, "Platforms")
    }
    assert cells["Python"][0] == [PROJECT["requires-python"]]
    assert f"nvidia-cuda-runtime=={cells['CUDA'][1][0]} " in LOCK
    assert cells["Kubernetes"] == ([OLDEST, "launch/kubernetes/"], [OLDEST])
    compose = (ROOT / "launch/compose.yaml").read_text()
    for name in ("Prometheus", "Grafana"):
        assert f"image: {cells[name][1][0]}\n" in compose


def test_check_reports_a_wrong_version_on_the_page() -> None:
    assert package_faults(PAGE.replace("bentoml==1.4.39", "bentoml==1.4.38")) == [
        "bentoml==1.4.38 is not in pyproject.toml"
    ]
    assert len(package_faults(PAGE.replace("`0.54.0`", "`0.53.0`"))) == 1
    assert format_faults(PAGE, formats_in_code() | {"slipway/new.py": "1"}) == [
        "slipway/new.py: None on the page, 1 in the code"
    ]


def test_error_gives_the_former_format_of_a_bundle_or_certificate(tmp_path: Path) -> None:
    for name in ("bundle.json", "certificate.json"):
        (tmp_path / name).write_text(json.dumps({"format_version": 2}))
    with pytest.raises(
        BundleError, match=r"format version 2, .* version 8\. Run `dvc repro export`"
    ):
        load_bundle(tmp_path)
    with pytest.raises(CertificateError, match=r"format version 2, .* version 5\. Run `dvc repro"):
        read_certificate(tmp_path / "certificate.json")
    with pytest.raises(BundleError, match=r"drift\.json has format version 2, .* version 4"):
        parse_references(b'{"format_version": 2}')
