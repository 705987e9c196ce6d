"""`slipway dataset collect OUT.parquet`: writes logged requests and their labels as a data set.

The most informative rows come first. Prints the command that merges the rows into the project's
data, and does not train. See docs/how-to/collect.md.
"""

import os
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from slipway.artifacts.bundle import Bundle, load_bundle
from slipway.artifacts.label_sets import labels_in
from slipway.artifacts.locations import BUNDLE
from slipway.inputs.columns import Column, ColumnContract
from slipway.inputs.images import ImageContract
from slipway.inputs.texts import TextContract
from slipway.system import files
from slipway.system.command_line import CommandParser
from slipway.system.command_run import run_command
from slipway.system.errors import DataError, UnavailableError
from slipway.traffic.monitoring_records import DEFAULT_STATE, read_drifted_spans, read_ground_truth
from slipway.traffic.selection import Content, SelectedRows, collect

# Columns that `data` may name but requests do not contain.
_OPTIONAL_COLUMNS = ("group_column", "time_column", "weight_column", "split_column")
_ARROW = {
    "number": pa.float64(),
    "boolean": pa.bool_(),
    "category": pa.string(),
    "date": pa.string(),
}
# The type of an image cell in data sets of the Hugging Face hub.
_IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
_SHOWN_LABELS = 20
ALL_COLLECTED = b"slipway_all_collected"  # metadata key: each row of the file was collected


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `slipway dataset collect`. Raises SlipwayError if no rows can be written."""
    given = _parser().parse_args(arguments)
    if given.request_log is None:
        raise UnavailableError(
            "there is no request log: set --request-log, or SLIPWAY_REQUEST_LOG_DIRECTORY as for "
            "the service."
        )
    if not given.request_log.is_dir():
        raise UnavailableError(
            f"{given.request_log} is not a folder; set --request-log to the service's "
            "SLIPWAY_REQUEST_LOG_DIRECTORY."
        )
    if given.out.suffix != ".parquet":
        raise DataError(f"{given.out} does not end in .parquet; name a Parquet file.")
    manifest = load_bundle(given.bundle).manifest
    columns = column_names(manifest, given.image_column, given.target_column)
    labels, drifted = read_ground_truth(given.state), read_drifted_spans(given.state)
    collected = collect(
        given.request_log,
        labels,
        drifted,
        manifest.input,
        manifest.output.labels,
        num_rows=given.rows,
        unlabelled=given.unlabelled,
    )
    if not collected.items:
        raise DataError(
            f"there is nothing to collect: {_left_out(collected)}. Send labels to POST /feedback, "
            "or use --unlabelled."
        )
    write_rows(given.out, collected, manifest, columns)
    print(summary(collected, manifest, given.out, ", ".join(columns[1])))


def write_rows(
    out: Path, collected: SelectedRows, manifest: Bundle, columns: tuple[str, list[str]]
) -> None:
    """Write the selected rows to `out`, a Parquet file that only its owner can read.

    `columns` is the result of `column_names`.
    """
    table = _table(collected, manifest, *columns)
    table = table.replace_schema_metadata({ALL_COLLECTED: "true"})
    out.parent.mkdir(parents=True, exist_ok=True)
    with files.new_file(out, files.PRIVATE) as file:  # personal data, as in the request log
        pq.write_table(table, file)


def summary(collected: SelectedRows, manifest: Bundle, out: Path, target_column: str) -> str:
    """Return text about the written and the omitted rows, with the command to run next."""
    items = collected.items
    num_unlabelled = sum(item.truth is None for item in items)
    facts = [
        f"{sum(item.is_ood for item in items)} OOD rows",
        f"{sum(item.drifted for item in items)} from drifted windows",
    ]
    lines = [
        f"{len(items)} of {collected.num_logged} logged items are in {out}, most informative first"
    ]
    if manifest.output.kind != "value":
        facts.insert(0, f"{sum(item.error > 0 for item in items)} wrong predictions")
        counts = Counter(str(item.truth) for item in items if item.truth is not None)
        shown = ", ".join(f"{label} {count}" for label, count in counts.most_common(_SHOWN_LABELS))
        lines.append(f"  labels: {shown or 'none'}{', ...' * (len(counts) > _SHOWN_LABELS)}")
    lines[1:1] = [f"  {', '.join(facts)}", f"  left out: {_left_out(collected)}"]
    if num_unlabelled:
        lines.append(
            f"next: fill in {num_unlabelled} empty cells of {target_column!r}; "
            "`clean` refuses rows without a label"
        )
    lines.append(f"{'then' if num_unlabelled else 'next'}: {join_command(out)}")
    lines.append("  because few rows rarely train a model that passes its gates; these rows only:")
    return "\n".join([*lines, f"  {next_command(manifest, out)}"])


def join_command(out: Path) -> str:
    """Return the command that merges the collected rows into the project's data."""
    return f"slipway dataset merge data/next.parquet --new {shlex.quote(str(out))}"


def next_command(manifest: Bundle, out: Path) -> str:
    """Return the command that starts an experiment with the collected rows."""
    data = manifest.lineage.params.get("data", {})
    absent = [f"data.{key}=null" for key in _OPTIONAL_COLUMNS if data.get(key) is not None]
    return " ".join(["slipway run", shlex.quote(f"data.path={out}"), *absent])


_SERVICE_PATHS: dict[str, tuple[str, Path | None]] = {
    "--request-log": ("SLIPWAY_REQUEST_LOG_DIRECTORY", None),
    "--access-log": ("SLIPWAY_ACCESS_LOG_DIRECTORY", None),
    "--state": ("SLIPWAY_STATE", DEFAULT_STATE),
    "--bundle": ("SLIPWAY_BUNDLE", BUNDLE),
}


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="slipway dataset collect", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("out", type=Path, metavar="OUT.parquet", help="data set to write")
    add_service_paths(parser, "--request-log", "--state", "--bundle")
    parser.add_argument(
        "--rows", type=_at_least_one, help="number of rows, most informative first (default: all)"
    )
    parser.add_argument(
        "--unlabelled",
        action="store_true",
        help="include rows without a label, with an empty cell, for a labelling tool",
    )
    parser.add_argument(
        "--image-column", help="its name (default: as in the bundle's training data)"
    )
    parser.add_argument(
        "--target-column", help="its name (default: as in the bundle's training data)"
    )
    return parser


def add_service_paths(parser: CommandParser, *names: str) -> None:
    """Add options for the service's paths to a parser.

    The defaults are its `SLIPWAY_` variables.
    """
    for name in names:
        variable, default = _SERVICE_PATHS[name]
        given = os.environ.get(variable)
        parser.add_argument(
            name,
            type=Path,
            default=Path(given) if given else default,
            help=f"default: {variable}" + (f", else {default}" if default else ""),
        )


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def column_names(
    manifest: Bundle, image: str | None = None, target: str | None = None
) -> tuple[str, list[str]]:
    """Return (image column, target columns), from the arguments or else from the bundle.

    Raises UnavailableError if neither names them.
    """
    data = manifest.lineage.params.get("data", {})
    image = image or data.get("image_column")
    target = target or data.get("target_column")
    if target is None or (image is None and isinstance(manifest.input, ImageContract)):
        raise UnavailableError(
            "the bundle does not name the columns of its data set: set --target-column and "
            "--image-column."
        )
    return str(image), target if isinstance(target, list) else [str(target)]


def _table(
    collected: SelectedRows, manifest: Bundle, image_column: str, target_columns: list[str]
) -> pa.Table:
    contents = [collected.contents[item.key] for item in collected.items]
    inputs = input_cells(contents, manifest) or {
        image_column: pa.array([{"bytes": content, "path": None} for content in contents], _IMAGE)
    }
    return pa.table(inputs | _targets(collected, manifest, target_columns))


def input_cells(contents: Sequence[Content], manifest: Bundle) -> dict[str, pa.Array]:
    """Return the (N,) cells of each input column of N logged rows; {} if the rows are images."""
    if isinstance(manifest.input, ColumnContract):
        return {column.name: _cells(contents, column) for column in manifest.input.columns}
    names = manifest.input.columns if isinstance(manifest.input, TextContract) else []
    return {
        name: pa.array([row[name] for row in contents if isinstance(row, dict)], pa.string())
        for name in names
    }


def _targets(collected: SelectedRows, manifest: Bundle, columns: list[str]) -> dict[str, pa.Array]:
    """Return the target column, or for several labels one boolean column for each label."""
    labels = [item.truth for item in collected.items]
    if len(columns) == 1:
        kind = pa.float64() if manifest.output.kind == "value" else pa.string()
        return {columns[0]: pa.array(labels, kind)}
    sets = [None if truth is None else labels_in(str(truth)) for truth in labels]
    return {
        name: pa.array([None if own is None else name in own for own in sets], pa.bool_())
        for name in columns
    }


def _cells(contents: Sequence[Content], column: Column) -> pa.Array:
    values: list[Any] = [content[column.name] for content in contents if isinstance(content, dict)]
    return pa.array(values, _ARROW[column.kind])


def _left_out(collected: SelectedRows) -> str:
    return (
        ", ".join(
            f"{count} {reason}" for reason, count in sorted(collected.left_out.items()) if count
        )
        or "none"
    )


if __name__ == "__main__":
    run_command(main)
