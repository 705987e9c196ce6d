"""Describes the origin of the model behind an answer: version, certificate, code, data."""

import json

from slipway.artifacts.bundle import DataSource, Lineage, LoadedBundle
from slipway.traffic.request_log import LoggedRequest

_STAGE = "dvc.lock#"
_PACKED = "packed/manifest.json"
_INDENT = 13


def describe_request(request: LoggedRequest) -> str:
    """Format time, rows and backend of a request as one line."""
    ran = f"{request.execution.backend}/{request.execution.provider}/{request.execution.variant}"
    rows = "1 row" if request.num_rows == 1 else f"{request.num_rows} rows"
    return _line(
        "request",
        f"{request.request_id}, {request.time:%Y-%m-%d %H:%M:%S.%f} UTC, {rows}, "
        f"{len(request.payload)} bytes, {ran}",
    )


def describe_model(bundle: LoadedBundle, certificate: str) -> str:
    """Format version, certificate, code and data, one line each."""
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
    """Format all digests of bundle, data, files and stages, the params and package versions."""
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
            _lines("dvc.lock", stages, "it did not exist"),
            _lines("params", params, "none"),
            _lines("versions", manifest.versions, "none"),
        ]
    )


def _code(lineage: Lineage) -> str:
    if lineage.git_revision is None:
        return "not in a git work tree"
    state = "with uncommitted changes" if lineage.git_dirty else "nothing uncommitted"
    return f"git {lineage.git_revision}, {state}"


def _data(source: DataSource | None) -> str:
    if source is None:
        return "dvc.lock did not name the raw data; see the packed data"
    amount = [f"{source.files:,} files"] if source.files is not None else []
    amount += [f"{source.bytes:,} bytes"] if source.bytes is not None else []
    return ", ".join([source.path, f"{source.hash} {source.digest}", *amount])


def _lines(title: str, content: dict[str, str], nothing: str) -> str:
    width = max(map(len, content), default=0)
    entries = [f"{name:{width}}  {value}" for name, value in content.items()] or [nothing]
    return "\n".join(
        _line(title if number == 0 else "", entry) for number, entry in enumerate(entries)
    )


def _line(title: str, text: str) -> str:
    return f"{title:{_INDENT}}{text}".rstrip()
