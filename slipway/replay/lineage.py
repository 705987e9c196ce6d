"""Where the model behind an answer comes from, as text: version, bundle, certificate, code, data, and with `--lineage` all of it."""

import json

from slipway.artifacts.bundle import DataSource, Lineage, LoadedBundle
from slipway.traffic.request_log import LoggedRequest

_STAGE = "dvc.lock#"
_PACKED = "packed/manifest.json"
_SHORT = 12
_INDENT = 13


def describe_request(request: LoggedRequest) -> str:
    """One line: when it was answered, how many rows, and what ran."""
    ran = f"{request.execution.backend}/{request.execution.provider}/{request.execution.variant}"
    rows = "1 row" if request.num_rows == 1 else f"{request.num_rows} rows"
    return _line(
        "request",
        f"{request.request_id}, {request.time:%Y-%m-%d %H:%M:%S.%f} UTC, {rows}, {len(request.payload)} bytes, {ran}",
    )


def describe_model(bundle: LoadedBundle, certificate: str) -> str:
    """Version, certificate, code and data, a line each."""
    lineage = bundle.manifest.lineage
    return "\n".join(
        [
            _line("model", f"{bundle.version} in {bundle.root}"),
            _line("certificate", certificate),
            _line("code", _code(lineage)),
            _line("data", _data(lineage.data)),
        ]
    )


def describe_lineage(bundle: LoadedBundle) -> str:
    """The rest: full digests of bundle, packed data, files and stages, the params that shaped it, and the packages."""
    manifest = bundle.manifest
    digests = manifest.lineage.digests
    packed = next(
        (digest for path, digest in digests.items() if path.endswith(_PACKED)), "not known"
    )
    stages = {
        name.removeprefix(_STAGE): digest
        for name, digest in digests.items()
        if name.startswith(_STAGE)
    }
    others = {name: digest for name, digest in digests.items() if not name.startswith(_STAGE)}
    params = {
        name: json.dumps(value, ensure_ascii=False)
        for name, value in manifest.lineage.params.items()
    }
    return "\n".join(
        [
            _line("bundle", f"SHA-256 {bundle.digest}"),
            _line("packed data", f"SHA-256 {packed}"),
            _lines("files", others, "none"),
            _lines("dvc.lock", stages, "it was not there"),
            _lines("params", params, "none"),
            _lines("versions", manifest.versions, "none"),
        ]
    )


def _code(lineage: Lineage) -> str:
    if lineage.git_revision is None:
        return "not in a git work tree"
    return f"git {lineage.git_revision}, {'with changes that were not committed' if lineage.git_dirty else 'nothing uncommitted'}"


def _data(source: DataSource | None) -> str:
    if source is None:
        return "dvc.lock did not name the raw data; see the packed data"
    amount = [f"{source.files:,} files"] if source.files is not None else []
    amount += [f"{source.bytes:,} bytes"] if source.bytes is not None else []
    return ", ".join([source.path, f"{source.hash} {source.digest}", *amount])


def _lines(title: str, content: dict[str, str], nothing: str) -> str:
    """A line for each entry, the first behind the title."""
    width = max(map(len, content), default=0)
    entries = [f"{name:{width}}  {value}" for name, value in content.items()] or [nothing]
    return "\n".join(
        _line(title if number == 0 else "", entry) for number, entry in enumerate(entries)
    )


def _line(title: str, text: str) -> str:
    return f"{title:{_INDENT}}{text}".rstrip()
