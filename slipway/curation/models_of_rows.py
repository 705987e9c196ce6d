"""Finds the models whose training data contained certain rows: "yes", "no" or "cannot tell".

A bundle records the digest of its data. The data with this digest is searched: the present files,
or an older version in DVC's cache. If neither has the digest, the answer is "cannot tell".
"""

import hashlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from slipway.artifacts.bundle import MANIFEST, load_bundle
from slipway.config.sections import DataParams
from slipway.config.yaml_files import parse_yaml
from slipway.data.erasure.request_rows import RequestContents, find_collected
from slipway.data.erasure.rows import FoundRows, find_group
from slipway.data.sources.raw_tables import column_names
from slipway.data.sources.text_format import TextFormat
from slipway.experiments import repository
from slipway.serving.rollout.records.database import read_recorded
from slipway.system import files
from slipway.system.contract import Contract
from slipway.system.errors import SlipwayError
from slipway.traffic.request_log import RequestRows

_CERTIFICATE = "certificate.json"
_CACHE = Path(".dvc/cache/files/md5")  # DVC's default cache; a cache elsewhere is not searched


class ModelOfRows(Contract):
    """A model, with the answer whether its data contained some of the rows."""

    version: str
    place: str  # path of its bundle, or "history" if only the service's history names it
    data: str | None  # DVC's digest of the data
    certificate: str | None  # SHA-256 of certificate.json, in hex
    saw: Literal["yes", "no", "cannot tell"]
    why: str

    @property
    def text(self) -> str:
        """The answer in one line, for the console."""
        return f"{self.version} ({self.place}): {self.saw}, {self.why}"


@dataclass(frozen=True)
class RowSelection:
    """A person's rows, as the user names them in the command."""

    groups: frozenset[str]  # values of data.group_column
    requests: RequestRows
    names: tuple[str, ...]  # names of files below data.path, such as cat/1.png

    @property
    def digest(self) -> str:
        whole = sorted(name for name, items in self.requests.items() if items is None)
        single = sorted([name, *sorted(items)] for name, items in self.requests.items() if items)
        return files.digest_json(
            [sorted(self.groups), whole, *self.names, *([single] if single else [])]
        )


@dataclass(frozen=True)
class RowSearch:
    """Searches present and older tables for the selected rows."""

    data: DataParams
    selection: RowSelection
    contents: RequestContents
    raw: Sequence[Path]  # the tables of `data.path`, which must have data.group_column

    def rows_of(self, path: Path) -> FoundRows | None:
        """Return the selected rows of a table; None if it cannot contain any."""
        by_request = find_collected(path, self.data, self.contents)
        if not self.selection.groups or not self._has_groups(path):
            return by_request
        by_group = find_group(path, self.data, self.selection.groups)
        if by_request is None:
            return by_group
        return replace(by_group, is_found=by_group.is_found | by_request.is_found)

    def _has_groups(self, path: Path) -> bool:
        own = path in self.raw
        return own or self.data.group_column in column_names(path, TextFormat.of(self.data))


def models_of(
    search: RowSearch, changed: Sequence[Path], bundle: Path, state: Path
) -> list[ModelOfRows]:
    """Return all known models, from bundles, the service's history and DVC's experiments.

    `changed` are the present files that contain some of the rows.
    """
    root = Path(search.data.path)
    known = {files.md5_file(path): True for path in changed}
    if root.is_file():
        known[files.md5_file(root)] = root in changed
    elif root.is_dir():
        known[folder_digest(root)] = any(path.is_relative_to(root) for path in changed)
    found: dict[str, ModelOfRows] = {}

    def add(
        version: str, place: str, digest: str | None, name: str, certificate: str | None
    ) -> None:
        saw, why = _answer(digest, name, known, search)
        found.setdefault(
            version,
            ModelOfRows(
                version=version,
                place=place,
                data=digest,
                certificate=certificate,
                saw=saw,
                why=why,
            ),
        )

    folders = [bundle.parent, Path("artifacts"), state]
    for manifest in sorted({path for folder in folders for path in folder.rglob(MANIFEST)}):
        try:
            found_bundle = load_bundle(manifest.parent)
        except SlipwayError:
            continue
        near = [manifest.parent / _CERTIFICATE, manifest.parent.parent / _CERTIFICATE]
        certificate = next((files.sha256_file(path) for path in near if path.is_file()), None)
        data = found_bundle.manifest.lineage.data
        add(
            found_bundle.version,
            str(found_bundle.root),
            data.digest if data else None,
            Path(data.path).name if data else "",
            certificate,
        )
    for entry in read_recorded(state).entries:
        if entry.stable is not None:
            served = entry.stable
            add(served.version, "history", served.data, root.name, served.certificate)
    for name, commit in repository.experiments().items():
        if not repository.file_at(commit, "dvc.yaml"):  # of another project in this repository
            continue
        add(
            name,
            "an experiment that DVC keeps",
            _locked_digest(repository.file_at(commit, "dvc.lock"), search.data.path),
            root.name,
            None,
        )
    return list(found.values())


def folder_digest(folder: Path) -> str:
    """Return DVC's digest of a folder: the MD5 of the list of its files and their digests."""
    listed = [
        {"md5": files.md5_file(path), "relpath": path.relative_to(folder).as_posix()}
        for path in folder.rglob("*")
        if path.is_file()
    ]
    listed.sort(key=lambda entry: entry["relpath"])
    text = json.dumps(listed, sort_keys=True)
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest() + ".dir"


def _locked_digest(lock: str, path: str) -> str | None:
    """Return the digest of the raw data from the text of a dvc.lock; None if it is not there."""
    content = parse_yaml(lock.encode(), "dvc.lock") if lock else {}
    stage = content.get("stages", {}).get("clean", {})
    return next((one.get("md5") for one in stage.get("deps", []) if one.get("path") == path), None)


def _answer(
    digest: str | None, name: str, known: dict[str, bool], search: RowSearch
) -> tuple[Literal["yes", "no", "cannot tell"], str]:
    if digest is None:
        return "cannot tell", "its data is not recorded"
    if digest in known:
        return ("yes" if known[digest] else "no"), "its data is the present one"
    cached = _CACHE / digest[:2] / digest[2:]
    if not cached.is_file() or digest.endswith(".dir"):
        return "cannot tell", "the version of its data is not here any more"
    try:
        with tempfile.TemporaryDirectory() as folder:
            link = Path(folder, name)  # the reader is chosen by the file's suffix
            link.symlink_to(cached.resolve())
            rows = search.rows_of(link)
    except SlipwayError:
        return "cannot tell", "the version of its data cannot be read"
    has_rows = rows is not None and bool(rows.num_rows)
    return ("yes" if has_rows else "no"), "by the version of its data in DVC's cache"
