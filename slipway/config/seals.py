"""Seals the inputs of a stage: its records then name exactly the inputs that it read.

When a stage starts, it notes the params that `dvc.yaml` lists for it, defaults included, the
digests of its code, and the size, time and inode of the files it depends on. When it ends, before
it removes resumable state, it compares them. If something changed, the stage fails; else it writes
the seal, `artifacts/seals/STAGE.json`.

DVC sees code and params as the two digests that the stage `code` writes into code.yaml. So a stage
refuses to run with others, and compares the seals of the stages before it with `dvc.lock`. A stage
that was run by hand has no entry there, and its seal is taken as it is.
"""

import fnmatch
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from slipway.config.params import flat, read_content, resolved, value_at
from slipway.config.stage_graph import RESTORE, Pipeline, load_mapping, read_pipeline
from slipway.kinds.code_digest import (
    CODE_DIGESTS,
    project_kinds,
    project_names,
    recall,
    stage_files,
)
from slipway.kinds.registry import TaskKind
from slipway.system import files
from slipway.system.errors import ParamsError, SchemaError, SealError, UnavailableError

SEALS = Path("artifacts/seals")
_FORMAT = 2
_PARAMS, _LOCK = "params.yaml", Path("dvc.lock")
_MODEL = "artifacts/model"  # whose model.json holds the params of train
_ROOT = Path()
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "LOCAL_RANK")


@dataclass(frozen=True)
class Seal:
    """The inputs of one run of a stage: its params, code and data."""

    stage: str
    # Params by key, as `dvc.yaml` lists them: "seed", "data.task", "train". Defaults are filled in.
    params: dict[str, Any]
    kinds: list[TaskKind]  # whose parts count as code
    named: dict[str, list[str]]  # the user's own code, by the key of params.yaml that names it
    code: dict[str, str]  # hex digest by path
    # For each dependency, digests of sizes, times and inodes by folder.
    inputs: dict[str, dict[str, str]]
    # The raw data that the first stage reads, as in dvc.lock: hex MD5 of a table or an archive,
    # number and total size of the files in a folder.
    data: dict[str, str | dict[str, int]]
    before: list[str]  # stages that run before

    def check(self) -> None:
        """Raise SealError if params, code or inputs changed since the stage began."""
        code = stage_files(_ROOT, self.stage, self.kinds, self.named)
        _raise_changed(self.stage, "code", _changed_names(self.code, code))
        for path, then in self.inputs.items():
            _raise_changed(self.stage, path, _changed_names(then, _state(Path(path))))
        # Last, because DVC reads params.yaml soon after.
        params = _picked(_content_now(self.stage), list(self.params))
        _raise_changed(self.stage, _PARAMS, _changes(self.params, params))

    def write(self) -> None:
        """Write the seal: digests and params only, so that equal runs give equal files."""
        content = {
            "format_version": _FORMAT,
            "stage": self.stage,
            "params": self.params,
            "code": files.digest_json(self.code),
            "data": self.data,
        }
        files.write_json(_seal_path(self.stage), content)


class _LockedPath(BaseModel):
    """The entry of one dependency or output in dvc.lock."""

    path: str
    hash: str | None = None
    md5: str | None = None
    nfiles: int | None = None
    size: int | None = None

    def facts(self) -> str | dict[str, int | None] | None:
        """Return the MD5 of a file, or the `nfiles` and `size` (in bytes) of a folder.

        None if dvc.lock lacks them.
        """
        if self.hash != "md5" or self.md5 is None:
            return None
        if not self.md5.endswith(".dir"):
            return self.md5
        counts = {"nfiles": self.nfiles, "size": self.size}
        return None if None in counts.values() else counts


class _Locked(BaseModel):
    """The entry of a stage in dvc.lock."""

    params: dict[str, dict[str, Any]] = {}
    deps: list[_LockedPath] = []
    outs: list[_LockedPath] = []


_open: list[Seal] = []  # seals of the stage that this process runs


@contextmanager
def sealed(stage: str | None, content: dict[str, Any]) -> Iterator[None]:
    """Seal the inputs of `stage` while the block runs. `content` has every key of params.yaml.

    Nothing is sealed
    * without a `stage`,
    * in the stage `code`,
    * in training processes that another process started.

    Raises SealError if the seal of an earlier stage does not match dvc.lock, if code.yaml is of
    other code or params, or if inputs change during the block.
    """
    if stage is None or stage == "code" or any(_rank(name) > 0 for name in _RANKS):
        yield
        return
    recall(_ROOT)
    pipeline = read_pipeline(content)
    before, deps = _sealed_before(pipeline, stage), pipeline.deps.get(stage, [])
    facts = {} if before else {path: _facts(Path(path)) for path in deps}
    kinds, named = project_kinds(_ROOT), project_names(_ROOT)
    seal = Seal(
        stage=stage,
        params=stage_params(content, pipeline, stage),
        kinds=kinds,
        named=named,
        code=stage_files(_ROOT, stage, kinds, named),
        inputs={path: _state(Path(path)) for path in deps},
        data={path: found for path, found in facts.items() if found},
        before=before,
    )
    _check_code(seal)
    _check_before(seal, pipeline)
    _seal_path(stage).unlink(missing_ok=True)
    _open.append(seal)
    try:
        yield
        seal.check()
        seal.write()
    finally:
        _open.remove(seal)


def _rank(variable: str) -> int:
    text = os.environ.get(variable) or "0"
    try:
        return int(text)
    except ValueError:
        raise UnavailableError(
            f"the environment variable {variable} is {text!r}, expected the number that a launcher "
            f"gives to a process. Run `unset {variable}`, or give it another name."
        ) from None


def check_inputs() -> None:
    """Raise SealError if the inputs of the running stage changed.

    A stage calls it before it removes its work in progress.
    """
    for seal in _open:
        seal.check()


def sealed_params(params: dict[str, Any]) -> dict[str, Any]:
    """Return the params that this stage and the stages before it ran with, by section.

    Returns `params` if no stage is sealed. Raises SealError if a seal is missing, or if two stages
    ran with different values of a key.
    """
    if not _open:
        return params
    seal = _open[-1]
    ran_with = {
        **{stage: _read_seal(stage)["params"] for stage in seal.before},
        seal.stage: seal.params,
    }
    found = [
        (key, value, stage) for stage, picked in ran_with.items() for key, value in picked.items()
    ]
    found.sort(key=lambda entry: entry[0].count("."))  # `train` before `train.epochs`
    merged: dict[str, Any] = {}  # by key: the value, and the first stage that ran with it
    for key, value, stage in found:
        known = next((name for name in _prefixes(key) if name in merged), None)
        if known is None:
            merged[key] = value, stage
            continue
        known_value, other = merged[known]  # of `key` or of a section that contains it
        if known != key:
            known_value = value_at(known_value, key.removeprefix(f"{known}."))
        if changes := _changes({key: known_value}, {key: value}):
            raise SealError(
                f"{other} and {stage} ran with different params: {'; '.join(changes)}. "
                "Run `dvc repro`, without -s."
            )
    return _nested({key: value for key, (value, _) in merged.items()})


def _check_code(seal: Seal) -> None:
    """Raise SealError if the digests in code.yaml are not those of the stage's code and params.

    dvc.lock would record those digests for this run.
    """
    known = load_mapping(_ROOT / CODE_DIGESTS).get(seal.stage) or {}
    for what, changed in (("code", f"the code that {seal.stage} runs"), ("params", _PARAMS)):
        if known and known.get(what) != stage_entry(seal.code, seal.params)[what]:
            raise SealError(
                f"{changed} changed after the stage `code` wrote {CODE_DIGESTS}. "
                "Run `dvc repro` again, without -s, or `python -m slipway.stages.code`."
            )


def stage_entry(code: dict[str, str], params: dict[str, Any]) -> dict[str, str]:
    """Return a stage's entry in code.yaml: hex digests of its code and of its params."""
    return {"code": files.digest_json(code), "params": files.digest_json(params)}


def stage_params(content: dict[str, Any], pipeline: Pipeline, stage: str) -> dict[str, Any]:
    """Return the values that `dvc.yaml` lists for a stage, of a content with every key."""
    return _picked(content, pipeline.params.get(stage) or list(content))


def _check_before(seal: Seal, pipeline: Pipeline) -> None:
    locked = _read_lock()
    for stage in seal.before:
        entry = locked.get(stage, _Locked())
        if _seal_path(stage).as_posix() not in [out.path for out in entry.outs]:
            continue  # run by hand, or never
        found = _read_seal(stage)
        recorded = {dep.path: dep.facts() for dep in entry.deps}
        then = {path: facts for path, facts in found["data"].items() if recorded.get(path)}
        now = {path: recorded[path] for path in then}
        then |= {"code": found["code"], "params": files.digest_json(found["params"])}
        changes = _changes(then, now | (entry.params.get(CODE_DIGESTS.name, {}).get(stage) or {}))
        if changes:
            raise SealError(
                f"dvc.lock does not match {stage}: {'; '.join(changes)}. The left value is what "
                f"{stage} ran with; the right one was recorded by DVC after an edit, or accepted "
                f"with `dvc commit`. Run `dvc repro -f -s {stage}`, then `dvc repro`."
            )
    if _MODEL in pipeline.deps.get(seal.stage, []) and "train" in seal.before:
        _check_model()


def _check_model() -> None:
    """Raise SealError if model.json has other params than the stage `train` ran with."""
    card = Path(_MODEL) / "model.json"
    if not _seal_path("train").is_file() or not card.is_file():  # the stage itself reports it
        return
    known = _read_seal("train")["params"]
    try:
        trained: Any = json.loads(card.read_bytes())
        actual = {"seed": trained["seed"], "train": trained["params"]}
    except (ValueError, LookupError, TypeError):  # the stage itself reports the damage
        return
    changes = _changes(actual, {"seed": known.get("seed"), "train": known.get("train")})
    if changes:
        raise SealError(
            f"{card} is not the model of {_seal_path('train')}: {'; '.join(changes)}. "
            f"Run `dvc repro -f train`, or `dvc checkout {_MODEL}`."
        )


def dependencies(stage: str) -> list[str]:
    """Return the paths that `dvc.yaml` names as the dependencies of a stage."""
    return read_pipeline(read_content()).deps.get(stage, [])


def _read_lock() -> dict[str, _Locked]:
    """Read the entries of dvc.lock by stage; empty if it is missing."""
    try:
        return TypeAdapter(dict[str, _Locked]).validate_python(
            load_mapping(_LOCK).get("stages") or {}
        )
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, ("stages", *first["loc"])))
        raise SchemaError(f"{_LOCK} is damaged at {place}: {first['msg']}. {RESTORE}") from None


def _read_seal(stage: str) -> dict[str, Any]:
    path = _seal_path(stage)
    try:
        content: Any = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise SealError(
            f"{path} is missing, so the inputs of {stage} are unknown. Run `dvc repro {stage}`."
        ) from None
    except ValueError as error:
        raise SealError(f"{path} is not readable ({error}). Run `dvc repro -f {stage}`.") from None
    if not isinstance(content, dict) or content.get("format_version") != _FORMAT:
        raise SealError(f"{path} is not of version {_FORMAT}. Run `dvc repro -f {stage}`.")
    return content


def _sealed_before(pipeline: Pipeline, stage: str) -> list[str]:
    """Return the sealed stages whose outputs `stage` depends on, directly or not."""
    return [
        name
        for name in pipeline.before(stage)
        if _seal_path(name).as_posix() in pipeline.outs[name]
    ]


def _seal_path(stage: str) -> Path:
    return SEALS / f"{stage}.json"


def _content_now(stage: str) -> dict[str, Any]:
    try:
        return resolved(read_content())
    except ParamsError as error:
        raise SealError(
            f"params.yaml changed while {stage} ran: {error} Restore it, then run again."
        ) from error


def _picked(content: dict[str, Any], keys: list[str]) -> dict[str, Any]:
    return {key: value_at(content, key) for key in keys}


def _changes(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return a text `key old -> new` for each value that changed from `then` to `now`."""
    old, new = dict(flat(then)), dict(flat(now))
    return [
        f"{key} {_text(old.get(key))} -> {_text(new.get(key))}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def _changed_names(then: dict[str, str], now: dict[str, str]) -> list[str]:
    return sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _raise_changed(stage: str, what: str, changes: list[str]) -> None:
    if changes:
        more = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
        fix = "Restore the value or run again." if what == _PARAMS else "Restore it or run again."
        raise SealError(f"{what} changed while {stage} ran: {'; '.join(changes[:3])}{more}. {fix}")


def _state(path: Path) -> dict[str, str]:
    """Return a digest of the files' names, sizes, times and inodes for each folder below `path`.

    If `path` is a file, the only entry has its size, time and inode.
    """
    if not path.is_dir():
        return {path.as_posix(): _stamp(path)}
    found = {}
    visited = set()
    for folder, folders, names in os.walk(path, followlinks=True):
        here = os.stat(folder)
        if (here.st_dev, here.st_ino) in visited:  # a link to a folder above it
            folders.clear()
            continue
        visited.add((here.st_dev, here.st_ino))
        digest = hashlib.sha256()
        for name in sorted(names):
            digest.update(
                f"{name}\0{_stamp(Path(folder, name))}\0".encode(errors="surrogateescape")
            )
        found[Path(folder).as_posix()] = digest.hexdigest()
    return found


def _facts(path: Path) -> str | dict[str, int] | None:
    """Return what dvc.lock records: MD5 of a file, or number and total size of a folder's files.

    None if DVC may ignore files of the folder. Like DVC, counts links to files, and does not
    enter links to folders.
    """
    if path.is_file():
        return files.md5_file(path)
    ignored = _ignored_names(path)
    sizes: list[int] = []
    for folder, folders, names in os.walk(path):
        if ignored is None or any(map(ignored.match, folders + names)):
            return None
        try:
            sizes += [os.stat(os.path.join(folder, name)).st_size for name in names]
        except OSError:  # a broken link, at which DVC fails as well
            return None
    return {"nfiles": len(sizes), "size": sum(sizes)} if path.is_dir() else None


def _ignored_names(folder: Path) -> re.Pattern[str] | None:
    """Return a regular expression of the file names that DVC may ignore anywhere in `folder`.

    Returns None if the .dvcignore files are too complex to tell: a pattern has brackets or a
    backslash, or it may match `folder` itself or a folder above it.
    """
    patterns = [".git", ".hg", ".dvc", ".dvcignore"]
    path = Path(os.path.abspath(folder))
    for above in path.parents:
        ignore_file, parts = above / ".dvcignore", path.relative_to(above).parts
        text = ignore_file.read_text(errors="replace") if ignore_file.is_file() else ""
        for line in filter(None, map(str.strip, text.splitlines())):
            pattern = line.removeprefix("!").rstrip("/")
            head = pattern.removeprefix("/").partition("/")[0]
            anchored = "/" in pattern
            if line.startswith("#"):
                continue
            if {"[", "\\"} & set(line) or fnmatch.filter(parts[:1] if anchored else parts, head):
                return None
            if not anchored:
                patterns.append(pattern)
        if (above / ".dvc").is_dir():  # the project's folder: DVC reads no .dvcignore above it
            break
    return re.compile("|".join(map(fnmatch.translate, patterns)))


def _stamp(path: Path) -> str:
    try:
        facts = path.stat()
    except OSError:
        return "missing"
    return f"{facts.st_size} {facts.st_mtime_ns} {facts.st_ino}"


def _prefixes(key: str) -> list[str]:
    """Return a dotted key with all keys above it: `a`, `a.b` and `a.b.c` for `a.b.c`."""
    parts = key.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    """Return nested sections for values with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        place = found
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return found
