"""`slipway dataset merge OUT.parquet`: merges collected rows into the data of `data.path`.

The base rows keep their content and order. The new rows follow; the column `slipway_collected`,
which is never an input, marks them. A new row that the base data already has is not added again. It
trains nothing, but prints the command for that. See docs/how-to/collect.md.
"""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from slipway.config.params import load_params
from slipway.config.sections import DataParams
from slipway.data.merge.new_rows import MergeReport
from slipway.data.sources.archives import ArchiveLimits, unpacked
from slipway.data.sources.raw_tables import COLLECTED
from slipway.data.sources.samples import GIVEN_SPLIT
from slipway.data.sources.sources import find_layout, with_given_split
from slipway.kinds.registry import kind_of
from slipway.system.command_line import CommandParser
from slipway.system.command_run import run_command
from slipway.system.errors import DataError

_MAX_SHOWN = 10


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command in the project's folder. It writes nothing if it raises SlipwayError."""
    options = _parser().parse_args(arguments)
    if options.out.suffix != ".parquet":
        raise DataError(
            f"{options.out} does not end in .parquet. Name a Parquet file to be written."
        )
    params = load_params()
    data = params.data
    if options.base is not None:
        data = data.model_copy(update={"path": str(options.base)})
    data = unpacked(data, ArchiveLimits.of(params.clean))
    _check_parquet(options.new)
    print(summary(merge(data, options.new, options.out), data, options.out))


def merge(data: DataParams, new: Path, out: Path, recent_from: int | None = None) -> MergeReport:
    """Write the rows of `data.path` and of `new` to `out`.

    A split given by folders or shards becomes the column GIVEN_SPLIT. Raises DataError if the
    columns of both differ.

    Args:
        recent_from: the rows of `new` from this index on describe the present traffic. The drift
            reference of a model that is trained on `out` is made of them. None: all rows of `new`,
            and those of `data.path` from its own first recent row on; without one, all rows.
    """
    if data.sources is not None:
        raise DataError(
            "data.sources joins several sources, expected one data set to merge into. "
            "Copy the new rows into a further source instead."
        )
    if data.split_file is not None:
        raise DataError(
            f"data.split_file {data.split_file!r} names the rows of data.path only. Write their "
            "splits into a column of the data, and name it in data.split_column."
        )
    data, _ = with_given_split(data)
    kind = kind_of(data.task).input
    if "merge" not in kind.parts:
        raise DataError(
            f"data.task is {data.task!r}, but `slipway dataset merge` cannot merge {kind.name}. "
            "Add the collected rows to data.path yourself."
        )
    run: Callable[[DataParams, Path, Path, int | None], MergeReport] = kind.load_part("merge")
    return run(data, new, out, recent_from)


def summary(report: MergeReport, data: DataParams, out: Path) -> str:
    """Return a text with the rows that were written, points to check, and the next command."""
    lines = [
        f"{report.num_base} rows of {data.path} and {report.num_added} collected rows are in "
        f"{out}, marked in the column {COLLECTED!r}"
    ]
    if report.num_duplicates:
        relabelled = report.num_relabelled
        note = f", {relabelled} of them with a new label" if relabelled else ""
        lines.append(f"  {report.num_duplicates} collected rows were there already{note}")
    if report.conflicts:
        shown = ", ".join(report.conflicts[:_MAX_SHOWN])
        shown += ", ..." * (len(report.conflicts) > _MAX_SHOWN)
        lines += [
            f"  {len(report.conflicts)} have another label in the base data, rows {shown}: "
            "both are kept; check them",
            "  (`clean` refuses or flags such pairs: clean.rules.conflicting_label)",
        ]
    lines += [f"  left out: {omitted}" for omitted in report.omitted]
    return "\n".join([*lines, f"next: {next_command(data, out)}"])


def next_command(data: DataParams, out: Path) -> str:
    """Return the `slipway run` command that starts an experiment with the merged rows."""
    changes = merged_params(data, out)
    return " ".join(["slipway run", *map(shlex.quote, changes)])


def merged_params(data: DataParams, out: Path) -> list[str]:
    """Return the settings of params.yaml, as assignments, with which the pipeline reads `out`."""
    changes = [f"data.path={out}"]
    if data.time_column is not None:
        changes.append("data.time_column=null")  # the unit of the new rows' times is not known
    if find_layout(data).given:
        changes.append(f"data.split_column={GIVEN_SPLIT}")
    if data.checksums is not None:
        changes.append("data.checksums=null")
    return changes


def _check_parquet(path: Path) -> None:
    remedy = "write it with `slipway dataset collect`, or name it with --new."
    if not path.is_file():
        raise DataError(f"{path} does not exist; {remedy}")
    try:
        pq.read_schema(path)
    except (pa.ArrowInvalid, OSError) as error:
        reason = str(error).rstrip(".")
        raise DataError(f"{path} is not a readable Parquet file ({reason}); {remedy}") from error


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="slipway dataset merge",
        description="Merges collected rows into the data of data.path, as one Parquet file.",
    )
    parser.add_argument("out", type=Path, metavar="OUT.parquet", help="the data set to write")
    parser.add_argument(
        "--new",
        type=Path,
        default=Path("data/collected.parquet"),
        help="the rows written by `slipway dataset collect`",
    )
    parser.add_argument(
        "--base", type=Path, help="the data to merge into (default: data.path of params.yaml)"
    )
    return parser


if __name__ == "__main__":
    run_command(main)
