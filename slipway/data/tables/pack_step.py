"""Packing of a table's rows, from the split to the packed store."""

import pyarrow as pa

from slipway.config.params import Params
from slipway.data.store.paths import PackPaths
from slipway.data.tables.files import read_cells
from slipway.data.tables.packing import pack_table, rare_categories
from slipway.system import files


def pack_rows(params: Params, rows: pa.Table, paths: PackPaths) -> str:
    """Encode the rows into the packed store; return what to print."""
    cells, columns = read_cells(paths.clean)
    in_vain = {
        "encoding jpeg": params.precompute.encoding == "jpeg",
        "train_size_px": params.precompute.train_size_px is not None,
    }
    notes = []
    if any(in_vain.values()):
        without_effect = ", ".join(key for key, asked in in_vain.items() if asked)
        notes.append(f"tables have no pixels: without effect here are {without_effect}")
    with files.new_directory(paths.packed) as folder:
        contract = pack_table(rows, cells, columns, params.precompute, params.data.task, folder)
    notes.append(
        f"packed {rows.num_rows} rows of {len(contract.columns)} columns, {contract.shape[0]} "
        f"numbers each, into {paths.packed}"
    )
    notes += rare_categories(cells, contract, params.precompute.max_categories)
    return "\n".join(notes)
