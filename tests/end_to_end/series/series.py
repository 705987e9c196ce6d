"""Rows of numbers from JSON Lines: {"series": [1.0, 2.0], "target": 3.0}."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import Field

from slipway.config.network_arguments import NetworkArguments
from slipway.config.params import Params
from slipway.config.sections import CleanParams, DataParams
from slipway.data.engine.rows import QUARANTINE, ROWS, SPLITS
from slipway.data.rules.report import CleanReport, CleanResult, clean_report
from slipway.data.rules.result import Cleaned
from slipway.data.store.packed import PackedManifest, PackPaths, write_manifest, write_split
from slipway.data.store.targets import packed_rows, target_scale, targets_of
from slipway.drift.features import Feature
from slipway.inputs.contract import InputContract
from slipway.system import files
from slipway.system.errors import DataError

LENGTH = 8
RULES = {"wrong_length": f"not {LENGTH} numbers"}


class SeriesContract(InputContract):
    """A row of `length` numbers."""

    kind: Literal["series"]
    length: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.length,)

    @property
    def dtype(self) -> type[np.float32]:
        return np.float32

    def example_rows(self, num_rows: int) -> NDArray[np.float32]:
        return np.random.default_rng(0).normal(size=(num_rows, self.length)).astype(np.float32)


class SeriesMlpArguments(NetworkArguments):
    """The arguments of `series_mlp`."""

    width: Annotated[int, Field(ge=1)] = 16


def check_series(data: DataParams) -> None:
    if not Path(data.path).is_file():
        raise DataError(f"data.path {data.path!r} is not a file.")


def read_lines(data: DataParams) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield source, SHA-256 and content of each line."""
    for number, line in enumerate(Path(data.path).read_bytes().splitlines()):
        yield str(number), files.sha256_bytes(line), json.loads(line)


def clean_series(data: DataParams, clean: CleanParams) -> CleanResult:
    kept, refused, num_read = [], [], 0
    for source, sha256, content in read_lines(data):
        num_read += 1
        if len(content["series"]) != LENGTH:
            detail = f"{len(content['series'])} numbers"
            refused.append(
                {"source": source, "rule": "wrong_length", "detail": detail, "severity": "error"}
            )
            continue
        row = dict.fromkeys(ROWS.names) | {"id": sha256[:32], "source": source, "sha256": sha256}
        row |= {"target": content["target"], "bytes": LENGTH * 4, "flags": [], "corrections": []}
        kept.append(row)
    rows = pa.Table.from_pylist(kept, schema=ROWS).sort_by("id")
    cleaned = Cleaned(rows, pa.Table.from_pylist(refused, schema=QUARANTINE), num_read)

    def report() -> CleanReport:
        return clean_report(cleaned, RULES, data, clean)

    return CleanResult(cleaned, report, "{}\n")


def pack_series(params: Params, rows: pa.Table, paths: PackPaths) -> str:
    series = {source: content["series"] for source, _, content in read_lines(params.data)}
    rows = rows.sort_by("id")
    targets = targets_of(rows, [], "table_regression")
    manifests = {}
    with files.new_directory(paths.packed) as folder:
        for split in SPLITS:
            chosen = pc.equal(rows["split"], split)
            part = rows.filter(chosen)
            (folder / split).mkdir()
            inputs = np.array([series[source] for source in part["source"].to_pylist()], np.float32)
            np.save(folder / split / "inputs.npy", inputs)
            packed = packed_rows(part, targets[chosen.to_numpy()])
            manifests[split] = write_split(folder / split, packed, (LENGTH,))
        is_training = pc.equal(rows["split"], "train").to_numpy()
        manifest = PackedManifest(
            format_version=3,
            task=params.data.task,
            input=SeriesContract(kind="series", length=LENGTH),
            classes=[],
            mean=[],
            std=[],
            target_scale=target_scale(targets[is_training]),
            splits=manifests,
        )
        write_manifest(folder, manifest)
    return f"packed {rows.num_rows} series"


def raw_rows(
    data: DataParams, contract: SeriesContract, wanted: set[str]
) -> Iterator[tuple[str, str, bytes]]:
    for source, sha256, content in read_lines(data):
        if source in wanted:
            yield source, sha256[:32], json.dumps(content["series"]).encode()


def input_features(contract: SeriesContract) -> list[Feature]:
    return [
        Feature(name=f"step {step}", kind="number", origin="input", categories=[])
        for step in range(contract.length)
    ]


def measure_features(contract: SeriesContract, rows: NDArray[np.float32]) -> NDArray[np.float32]:
    return rows


def row_cells(
    contract: SeriesContract, rows: Sequence[NDArray[Any]]
) -> tuple[list[str], list[list[str]], list[str]]:
    names = [f"step {step}" for step in range(contract.length)]
    return names, [[f"{value:g}" for value in row] for row in rows], names
