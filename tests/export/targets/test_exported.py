"""A graph that ONNX Runtime cannot load is in no export, on machines without the targets, too."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipway.export.targets.browser.export import read_runtime, write_browser
from slipway.export.targets.edge.export import EDGE, OPENVINO, write_script
from slipway.export.targets.exported import ExportSource, exported_contract
from slipway.export.targets.layouts import write_layout
from slipway.export.targets.triton.export import ServerExport, write_server
from slipway.system.errors import BundleError
from tests.export.targets.browser.runtimes import write_stand_in
from tests.export.targets.sources import planted_operator
from tests.serving.bundles import COLUMNS, ROW

WRITERS: dict[str, Callable[[Path, ExportSource], Any]] = {
    "browser": lambda out, source: write_browser(
        out, source, read_runtime(write_stand_in(out.parent / "runtime"))
    ),
    "edge": lambda out, source: write_script(out, source, EDGE),
    "openvino": lambda out, source: write_script(out, source, OPENVINO),
    "triton": lambda out, source: write_server(
        out, source, ServerExport("triton", "digits", "", None)
    ),
    "huggingface": lambda out, source: write_layout(out, source, "huggingface"),
}


@pytest.mark.parametrize("target", WRITERS)
def test_export_of_an_unknown_operator_is_refused_by_its_name(target: str, tmp_path: Path) -> None:
    source = planted_operator(tmp_path / "source", "Unknown")
    with pytest.raises(BundleError, match=r"ONNX Runtime cannot load the fp32 graph .*Unknown"):
        WRITERS[target](tmp_path / "out", source)
    assert not (tmp_path / "out").exists()


def test_exported_contracts_hold_no_rows_of_the_training_data() -> None:
    contract = COLUMNS.model_copy(update={"background": [ROW]})
    assert "background" in contract.model_dump()
    assert "background" not in exported_contract(contract)
