"""Spellings of one class or category, from `slipway init` to a request."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml

from slipway.config.params import parse_params
from slipway.config.sections import DataParams
from slipway.data.sources.text_format import USUAL_FORMAT
from slipway.data.tables.packing import fit_columns
from slipway.inference.rows import read_table
from slipway.inputs.columns import encode_rows, read_row
from slipway.project.inspection import inspect
from slipway.project.proposal import ProjectProposal, propose
from slipway.project.recipe import Machine
from slipway.system.errors import ParamsError
from tests.data.raw_files import cleaned, data_params, said
from tests.project_params import PROJECT

LAPTOP = Machine(cores=2, has_gpu=False, has_amx=False)
QUIET = {"near_duplicate": None, "conflicting_label": None}


def proposal_of(folder: Path, rows: list[str]) -> tuple[ProjectProposal, DataParams]:
    path = folder / "t.csv"
    path.write_text("\n".join(["x,size,target", *rows, ""]))
    proposal = propose(inspect(path), target="target", machine=LAPTOP)
    return proposal, parse_params(dict(proposal.params)).data


def test_labels_0_and_0_0_are_one_class_by_the_label_map_that_init_proposes(tmp_path: Path) -> None:
    labels = ["0", "0.0", "1.0", "1", "1.0", "0.0"]
    rows = [f"{row / 7:.3f},{row % 11},{labels[row % 6]}" for row in range(120)]
    _, data = proposal_of(tmp_path, rows)
    assert data.task == "table_classification"
    assert data.label_map == {"0.0": "0", "1.0": "1"}
    assert data.classes is None
    found = cleaned(data, rules=QUIET).cleaned.rows["label"].to_pylist()
    assert (found.count("0"), found.count("1")) == (60, 60)


def categories() -> list[str]:
    sizes = ["1", "1.0", "small", "Small", "huge"]
    return [f"{row / 7:.3f},{sizes[row % 5]},{row % 13}" for row in range(130)]


def test_spellings_of_a_category_are_joined_by_the_map_that_init_proposes(tmp_path: Path) -> None:
    proposal, data = proposal_of(tmp_path, categories())
    assert data.columns["size"].map == {"1.0": "1", "small": "Small"}
    assert any("values of 'size' that differ only in spelling" in w for w in proposal.warnings)
    found = cleaned(data, rules=QUIET)
    assert set(found.cells["size"].to_pylist()) == {"1", "Small", "huge"}
    assert yaml.safe_load(found.columns_yaml)["size"] == data.columns["size"].model_dump()


def test_a_request_and_a_file_may_have_the_spellings_that_the_map_names(tmp_path: Path) -> None:
    _, data = proposal_of(tmp_path, categories())
    table = cleaned(data, rules=QUIET)
    rows = np.ones(table.cells.num_rows, bool)
    contract = fit_columns(table.cells, rows, table.types, PROJECT.precompute)
    spelled: list[dict[str, Any]] = [{"x": 1.5, "size": size} for size in ("1", "1.0", "small")]
    sent = encode_rows([read_row(row, contract) for row in spelled], contract)
    np.testing.assert_array_equal(sent[0], sent[1])
    assert sent[2].tolist() != sent[0].tolist()
    from_file = read_table(pa.Table.from_pylist(spelled), contract, USUAL_FORMAT)
    np.testing.assert_array_equal(from_file.inputs, sent)


def test_a_map_keeps_a_category_whose_name_is_a_word_for_a_missing_value(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = [f"{['EU', 'NA', 'AS'][row % 3]},{row % 7},{row % 11}" for row in range(60)]
    path.write_text("\n".join(["region,b,target", *rows, ""]))
    columns = {"region": said("category", map={"NA": "NA"}).model_dump()}
    found = cleaned(data_params(path, columns=columns), rules=QUIET).cells["region"]
    assert found.null_count == 0
    assert found.to_pylist().count("NA") == 20


@pytest.mark.parametrize("name", ["NA", "null", "None"])
def test_init_and_clean_name_the_setting_that_keeps_a_class_such_as_na(
    tmp_path: Path, name: str
) -> None:
    rows = [f"{row / 7:.3f},{row % 11},{['EU', name, 'AS'][row % 3]}" for row in range(120)]
    proposal, data = proposal_of(tmp_path, rows)
    (warning,) = (text for text in proposal.warnings if "count as missing" in text)
    kept = {"label_map": {name: name}}
    assert yaml.safe_load(warning.partition("data.label_map to ")[2]) == kept["label_map"]
    (hint,) = cleaned(data, rules=QUIET).hints
    assert yaml.safe_load(hint.partition("params.yaml:\n")[2]) == kept
    found = cleaned(data.model_copy(update=kept), rules=QUIET)
    assert found.cleaned.rows["label"].to_pylist().count(name) == 40
    assert not found.hints
    assert not cleaned(data.model_copy(update={"missing_values": [name]}), rules=QUIET).hints


def test_init_says_that_the_only_other_class_counts_as_missing(tmp_path: Path) -> None:
    rows = [f"{row},{row % 11},{['EU', 'NA'][row % 2]}" for row in range(40)]
    with pytest.raises(ParamsError, match="If 'NA', which counts as missing, is a class"):
        proposal_of(tmp_path, rows)


def test_a_letter_beside_a_few_numbers_is_a_grade_and_no_word_for_a_missing_cell(
    tmp_path: Path,
) -> None:
    grades = ["1", "2", "3", "A", "2", "1"]
    measured = [f"{row / 7:.3f}" if row % 6 else "unknown" for row in range(120)]
    lines = [f"{grades[row % 6]},{measured[row]},{row % 2}" for row in range(120)]
    (tmp_path / "t.csv").write_text("\n".join(["grade,size,y", *lines]))
    params = propose(inspect(tmp_path / "t.csv"), target="y").params
    assert params["data"]["missing_values"] == ["unknown"]
