"""Caches engines built by ONNX Runtime's TensorRT provider, one sealed folder for each key.

The provider names an engine by the graph's structure, not by its weights
(microsoft/onnxruntime#6455). In a shared folder it would silently serve the engine of another model
with the same architecture. So each engine has a folder, named by the digest of its key: everything
that the engine depends on. The folder's seal repeats the key, with the SHA-256 of each file. A
folder with another key, without a seal, or with an altered engine is refused.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipway.artifacts.engine_manifest import Profile, differences
from slipway.system import files
from slipway.system.contract import Contract, parse_record
from slipway.system.errors import EngineError, IntegrityError, UnavailableError

SEAL = "seal.json"


class EngineKey(Contract):
    """The facts that a cached engine depends on, such as graph, GPU and library versions."""

    model_sha256: str
    precision: str
    profile: Profile
    onnxruntime_version: str
    tensorrt_version: str
    gpu: str
    compute_capability: str

    @property
    def folder(self) -> str:
        """The name of this key's folder: the first 32 hex digits of the key's digest."""
        return files.digest_json(self.model_dump(mode="json"))[:32]


class EngineSeal(Contract):
    """The content of `seal.json`: a folder's key, and the digests of its files."""

    key: EngineKey
    files: dict[str, str]  # hex SHA-256 by name


@contextmanager
def engine_folder(folder: Path, key: EngineKey) -> Iterator[Path]:
    """Yield the folder of `key`'s engines; a new folder is sealed after the block has built them.

    Raises EngineError for a folder of another key or without a seal, IntegrityError for an altered
    engine, UnavailableError if the block built no engine.
    """
    if folder.exists():
        _check_seal(folder, key)
        yield folder
        return
    with files.new_directory(folder) as building:
        yield building
        if not list(building.glob("*.engine")):
            raise UnavailableError(
                "ONNX Runtime's TensorRT provider built no engine: it gave every part of the graph "
                "to another provider."
            )
        built = [path for path in sorted(building.iterdir()) if path.is_file()]
        digests = {path.name: files.sha256_file(path) for path in built}
        seal = EngineSeal(key=key, files=digests)
        files.write_json(building / SEAL, seal.model_dump(mode="json"))


def _check_seal(folder: Path, key: EngineKey) -> None:
    path = folder / SEAL
    try:
        payload = path.read_bytes()
    except FileNotFoundError:
        raise EngineError(
            f"{folder} holds engines of unknown origin: {path} is missing. Remove {folder}."
        ) from None
    fix = f"Remove {folder}, and the engine is built again."
    seal = parse_record(EngineSeal, path, payload, EngineError, fix)
    differing = differences(
        {name: (value, getattr(key, name)) for name, value in dict(seal.key).items()}
    )
    if differing:
        raise EngineError(
            f"{folder} holds engines of another key. {differing}. "
            f"Each key has its own folder; use {key.folder}."
        )
    for name, digest in seal.files.items():
        path = folder / name
        if not path.is_file() or files.sha256_file(path) != digest:
            raise IntegrityError(f"{path} was altered or removed since it was built. {fix}")
    unknown = sorted({path.name for path in folder.iterdir()} - set(seal.files) - {SEAL})
    if unknown:
        raise EngineError(f"{folder} holds {unknown}, which its seal does not list. {fix}")
