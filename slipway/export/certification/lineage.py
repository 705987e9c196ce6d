"""Records the origin of a bundle and the machine of its certificate.

The facts come from git, dvc.lock and the installed packages. Missing facts (no git work tree, no
GPU) are recorded as missing, never guessed.
"""

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

from slipway.artifacts.bundle import DataSource, Lineage
from slipway.config.yaml_files import parse_yaml
from slipway.runtimes.cpu_int8 import int8_instructions
from slipway.runtimes.runtime import describe_session, this_machine, why_unavailable
from slipway.system import files
from slipway.system.cores import cpu_model, num_cores
from slipway.system.errors import SchemaError, UnavailableError
from slipway.system.version import DISTRIBUTION, git, installed_version

_PACKAGES = (
    "torch",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "onnxruntime-gpu",
    "tensorrt",
    "tensorrt-cu13",
    "bentoml",
    "numpy",
    "pillow",
)
# Every run of the pipeline writes these, so a change there says nothing about the code.
_NOT_CODE = (":(exclude)dvc.lock", ":(exclude)metrics", ":(exclude)code.yaml")


def trace_lineage(
    params: dict[str, Any], paths: list[Path], lock: Path = Path("dvc.lock")
) -> Lineage:
    """Return the lineage: git revision, params, digests of `paths` and of each stage in dvc.lock.

    The key of a stage's digest is "dvc.lock#STAGE", as in "dvc.lock#train".
    """
    revision = git(Path(), "rev-parse", "HEAD")
    changes = None
    if revision:
        changes = git(
            Path(), "status", "--porcelain", "--untracked-files=no", "--", ".", *_NOT_CODE
        )
    digests = {path.as_posix(): files.sha256_file(path) for path in paths}
    stages = _locked_stages(lock)
    locked = {f"{lock.name}#{stage}": files.digest_json(entry) for stage, entry in stages.items()}
    return Lineage(
        git_revision=revision,
        git_dirty=bool(changes),
        params=params,
        data=_raw_data(stages, params),
        digests={**digests, **locked},
    )


def package_versions() -> dict[str, str]:
    """Return the versions of the installed packages that export, run and serve a model."""
    versions = {"python": platform.python_version(), DISTRIBUTION: installed_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def describe_hardware() -> dict[str, str]:
    """Return facts about the machine that compares the models and measures latencies.

    `session_options` are those of ONNX Runtime on the CPU, for all models except the live
    service's.
    """
    hardware = {"cpu": cpu_model(), "int8": int8_instructions(), "cores": str(num_cores())}
    hardware |= {"system": f"{platform.system()} {platform.machine()}"}
    hardware |= {"session_options": describe_session(num_threads=0)}
    try:
        machine = this_machine()
    except UnavailableError:
        reason = why_unavailable("cuda")
        hardware["gpu"] = f"none: {reason}" if reason else "present, without TensorRT"
    else:
        hardware |= {
            "gpu": machine.gpu,
            "compute_capability": machine.compute_capability,
            "cuda": machine.cuda_version,
        }
    return hardware


def _raw_data(stages: dict[str, Any], params: dict[str, Any]) -> DataSource | None:
    """Return dvc.lock's entry for the raw data, a dependency of `clean`; None without one."""
    path = params.get("data", {}).get("path")
    for dependency in stages.get("clean", {}).get("deps", []):
        kind = dependency.get("hash", "md5")
        if dependency.get("path") == path and kind in dependency:
            size, count = dependency.get("size"), dependency.get("nfiles")
            return DataSource(
                path=path, hash=kind, digest=dependency[kind], bytes=size, files=count
            )
    return None


def _locked_stages(lock: Path) -> dict[str, Any]:
    if not lock.exists():
        return {}
    try:
        # DVC writes YAML 1.2, in which the class names yes and no are words without quotes.
        content = parse_yaml(lock.read_bytes(), lock.name)
    except ValueError as error:
        raise SchemaError(f"{error} Restore {lock} with git, or remove it.") from error
    if not isinstance(content, dict) or not isinstance(content.get("stages"), dict):
        raise SchemaError(
            f"{lock} has no stages, expected the file that dvc writes. "
            "Restore it with git, or remove it."
        )
    stages: dict[str, Any] = content["stages"]
    return stages
