"""precompute: decodes and resizes every image once, or encodes every row of a table.

Training maps the resulting arrays into memory. A killed run resumes.
"""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from slipway.artifacts.locations import CLEAN, PACKED, SPLIT
from slipway.config.params import Params
from slipway.config.stage_run import run_stage
from slipway.data.engine.rows import SPLIT_ROWS, read_table
from slipway.data.store.packed import PackPaths
from slipway.kinds.registry import kind_of

WORK = Path(".work/precompute")


def run(params: Params) -> None:
    """Pack the split rows; IntegrityError if a raw image changed since it was cleaned."""
    pack: Callable[[Params, pa.Table, PackPaths], str]
    pack = kind_of(params.data.task).input.load_part("pack")
    rows = read_table(SPLIT / "rows.parquet", SPLIT_ROWS)
    print(pack(params, rows, PackPaths(clean=CLEAN, packed=PACKED, work=WORK)))


if __name__ == "__main__":
    run_stage(run)
