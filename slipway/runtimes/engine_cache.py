"""The engines that ONNX Runtime's TensorRT provider builds and keeps: one folder for each key, sealed.

That provider names an engine by the graph's structure, not by its weights (microsoft/onnxruntime#6455), so in a folder that is shared
it serves another model's engine of the same architecture without a word. Here a folder's name is the digest of everything an
engine is bound to, and its seal says so again, with the SHA-256 of each file: a folder of another key, one without a seal and an
altered engine are refused.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from slipway.artifacts.engine_manifest import Profile, differences
from slipway.system import files
from slipway.system.contract import Contract
from slipway.system.errors import EngineError, IntegrityError, UnavailableError

SEAL = "seal.json"


class EngineKey(Contract):
    """Everything that an engine of ONNX Runtime's TensorRT provider is bound to."""

    model_sha256: str
    precision: str
    profile: Profile
    onnxruntime_version: str
    tensorrt_version: str
    gpu: str
    compute_capability: str

    @property
    def folder(self) -> str:
        """The name of this key's folder."""
        return files.digest_json(self.model_dump(mode="json"))[:32]


class Seal(Contract):
    """The content of `seal.json`."""

    key: EngineKey
    files: dict[str, str]  # hex SHA-256 by name


@contextmanager
def engines_of(root: Path, key: EngineKey) -> Iterator[Path]:
    """The folder below `root` for the engines of this key, where they are read, or built and then sealed.

    EngineError where it is another key's or nobody's, IntegrityError where an engine was altered, UnavailableError where none was built.
    """
    with engine_folder(root / key.folder, key) as folder:
        yield folder


@contextmanager
def engine_folder(folder: Path, key: EngineKey) -> Iterator[Path]:
    """The same for a folder of any name."""
    if folder.exists():
        _check_seal(folder, key)
        yield folder
        return
    with files.new_directory(folder) as building:
        yield building
        if not list(building.glob("*.engine")):
            raise UnavailableError(
                "ONNX Runtime's TensorRT provider built no engine: it gave every part of the graph to another provider."
            )
        _write_seal(building, key)


def _write_seal(folder: Path, key: EngineKey) -> None:
    digests = {
        path.name: files.sha256_file(path) for path in sorted(folder.iterdir()) if path.is_file()
    }
    files.write_json(folder / SEAL, Seal(key=key, files=digests).model_dump(mode="json"))


def _check_seal(folder: Path, key: EngineKey) -> None:
    seal = _read_seal(folder)
    differing = differences(
        {name: (value, getattr(key, name)) for name, value in dict(seal.key).items()}
    )
    if differing:
        raise EngineError(
            f"{folder} holds engines of another key. {differing}. Every key has a folder of its own; use {key.folder}."
        )
    for name, digest in seal.files.items():
        path = folder / name
        if not path.is_file() or files.sha256_file(path) != digest:
            raise IntegrityError(
                f"{path} was altered or removed since it was built. Remove {folder}, and the engine is built again."
            )
    strangers = sorted({path.name for path in folder.iterdir()} - set(seal.files) - {SEAL})
    if strangers:
        raise EngineError(
            f"{folder} holds {strangers}, which its seal does not name. Remove {folder}, and the engine is built again."
        )


def _read_seal(folder: Path) -> Seal:
    path = folder / SEAL
    try:
        return Seal.model_validate(json.loads(path.read_bytes()))
    except FileNotFoundError:
        raise EngineError(
            f"{folder} holds engines whose origin nothing tells: {path} is missing. Remove {folder}."
        ) from None
    except (ValueError, ValidationError) as error:
        raise EngineError(
            f"{path} is not a seal: {error}. Remove {folder}, and the engine is built again."
        ) from error
