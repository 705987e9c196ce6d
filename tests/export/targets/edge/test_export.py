"""The folder that `slipway export edge` writes, its limits, and its script in a new environment."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

import numpy as np
import onnxruntime
import pytest

from slipway.artifacts.certificate import Execution, Hop
from slipway.config.params import parse_params, read_content
from slipway.config.sections import ScriptParams
from slipway.export.certification.comparison import not_executed
from slipway.export.targets.edge import export
from slipway.export.targets.edge.export import (
    EDGE,
    NO_BUDGET,
    OPENVINO,
    ScriptTarget,
    require_script,
    require_within,
    run_script_hop,
    write_files,
    write_script,
)
from slipway.export.targets.exported import ExportRecord
from slipway.inputs.images import TransformContract
from slipway.inputs.texts import TextContract
from slipway.system.errors import ParityError, UnavailableError
from tests.encoder_folders import word_piece
from tests.export.targets.sources import (
    image_source,
    photo,
    photos,
    planted_operator,
    table_source,
    text_source,
    trained_text_source,
)
from tests.serving.bundles import CONTRACT, TEXTS
from tests.tokens import token_contract

MOST_INSTALLED_MB = 150
MEASURED = {"folder_mb": 3.0, "installed_mb": 144.2, "memory_mb": 90.0, "latency_ms": 1.5}


def limits(**given: float) -> ScriptParams:
    return NO_BUDGET.model_copy(update=given)


def hop(name: str, status: Literal["agrees", "differs", "not_executed"] = "agrees") -> Hop:
    execution = Execution(backend="edge", provider="cpu", precision="fp32", variant="fp32")
    found = not_executed(name, execution, "there is no uv here.")
    latency_ms = None if status == "not_executed" else 1.5
    return found.model_copy(update={"status": status, "latency_ms": latency_ms})


@pytest.mark.parametrize("name", ["edge", "openvino"])
def test_an_export_beyond_a_budget_is_refused_with_every_limit_named(name: str) -> None:
    require_within(limits(max_installed_mb=144.2, max_latency_ms=2.0), MEASURED, hop(name))
    with pytest.raises(
        ParityError, match=r"installed_mb is 144\.2, expected at most 100"
    ) as refusal:
        require_within(limits(max_installed_mb=100.0, max_latency_ms=1.0), MEASURED, hop(name))
    assert f"latency_ms is 1.5, expected at most 1 ({name}.max_latency_ms)" in str(refusal.value)
    assert "memory_mb" not in str(refusal.value)


def test_an_export_beyond_its_budget_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = table_source(tmp_path)
    monkeypatch.setattr(
        export, "run_script_hop", lambda *_: (hop("edge"), {"memory_mb": 90.0, "installed_mb": 1.0})
    )
    write_script(tmp_path / "within", source, EDGE, limits(max_memory_mb=90.0, max_folder_mb=1.0))
    with pytest.raises(ParityError, match=r"folder_mb is .*; memory_mb is 90, expected at most 80"):
        write_script(tmp_path / "out", source, EDGE, limits(max_memory_mb=80.0, max_folder_mb=0.01))
    content = json.loads((tmp_path / "within/export.json").read_text())
    assert content["facts"]["aarch64_run"] == "skipped: no --aarch64-system was given"
    assert (tmp_path / "within/run.py").exists()
    assert not (tmp_path / "out").exists()


def test_limit_of_a_number_that_was_not_measured_refuses_the_export(tmp_path: Path) -> None:
    unmeasured = {"folder_mb": 3.0}
    budget = limits(max_memory_mb=80.0, max_folder_mb=4.0)
    message = (
        r"budget: memory_mb is not measured, expected at most 80 \(edge\.max_memory_mb\)\. "
        r"The hop was not run: there is no uv here\. "
    )
    with pytest.raises(ParityError, match=message):
        require_within(budget, unmeasured, hop("edge", "not_executed"))
    require_within(limits(max_folder_mb=4.0), unmeasured, hop("edge", "not_executed"))
    require_within(budget, unmeasured, hop("edge", "differs"))  # its own error says more


def test_params_have_limits_for_each_script(root: Path) -> None:
    content = read_content(root / "params.yaml")
    section = {**NO_BUDGET.model_dump(), "max_memory_mb": 300.0}
    params = parse_params({**content, "openvino": section}, "params.yaml")
    assert params.edge is None
    assert params.openvino == limits(max_memory_mb=300.0)


def test_error_names_the_part_of_the_bundle_that_the_script_cannot_run(tmp_path: Path) -> None:
    transform = TransformContract(function="transforms:own", sha256="0" * 64)
    own = CONTRACT.model_copy(update={"transform": transform})
    with pytest.raises(UnavailableError, match=r"cannot carry the function transforms:own of .*; "):
        require_script(image_source(tmp_path / "own", photos(), input=own))


def test_exported_folder_of_a_model_of_masked_texts_has_the_code_that_masks(tmp_path: Path) -> None:
    masked = TEXTS.model_copy(update={"masked": ["email"]})
    write_files(tmp_path, text_source(tmp_path / "masked", masked, input=masked))
    assert "def personal_data" in (tmp_path / "personal_data.py").read_text()


def test_recipe_of_the_container_names_python_runtime_and_its_wheels(tmp_path: Path) -> None:
    write_files(tmp_path, table_source(tmp_path / "source"))
    runtime = f"onnxruntime=={onnxruntime.__version__}"
    assert (tmp_path / "requirements.txt").read_text().splitlines() == [
        f"numpy=={np.__version__}",
        runtime,
    ]
    recipe = (tmp_path / "Containerfile").read_text().splitlines()
    assert f"FROM docker.io/library/python:3.{sys.version_info[1]}-slim" in recipe
    install = "RUN pip install --no-cache-dir --only-binary=:all: -r /model/requirements.txt"
    assert recipe.index("COPY requirements.txt /model/") + 1 == recipe.index(install)
    assert f'LABEL slipway.runtime="{runtime}"' in recipe
    assert recipe[-2:] == ["USER 65534", 'ENTRYPOINT ["python", "/model/run.py"]']


@pytest.mark.process
def test_script_predicts_files_and_names_those_that_it_cannot_read(tmp_path: Path) -> None:
    write_files(tmp_path, image_source(tmp_path / "source", photos()))
    (tmp_path / "good.png").write_bytes(photo(1, (20, 20)))
    (tmp_path / "bad.png").write_bytes(b"no picture")
    command = [sys.executable, "run.py", "good.png", "bad.png", "gone.png"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    good, bad, gone = done.stdout.splitlines()
    assert '"label": ' in good
    assert "found no readable image, expected a whole PNG or JPEG. Save it as one." in bad
    assert "No such file" in gone
    (tmp_path / "empty").mkdir()
    command = [sys.executable, "run.py", "empty"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "found no file, expected files or folders of them. Name some." in done.stderr


@pytest.mark.nightly(seconds=60)
@pytest.mark.skipif(shutil.which("uv") is None, reason="there is no uv here")
@pytest.mark.parametrize("is_table", [False, True])
def test_script_in_its_own_environment_predicts_as_the_certified_graph_does(
    is_table: bool, tmp_path: Path
) -> None:
    jpegs = [photo(90 + row, (64 + row, 48), "JPEG") for row in range(4)]
    source = table_source(tmp_path) if is_table else image_source(tmp_path, [*photos(), *jpegs])
    record = write_script(
        tmp_path / "edge", source, EDGE, limits(max_installed_mb=MOST_INSTALLED_MB)
    )
    if record.hop.status == "not_executed":
        pytest.skip(record.hop.reason)
    assert record.certified
    assert record.hop.max_difference == 0.0
    assert record.facts["installed_mb"] < MOST_INSTALLED_MB


@pytest.mark.nightly(seconds=60)
@pytest.mark.skipif(shutil.which("uv") is None, reason="there is no uv here")
def test_edge_hop_differs_if_colour_channels_are_swapped(tmp_path: Path) -> None:
    source = image_source(tmp_path / "source", photos())
    write_files(tmp_path, source)
    script = (tmp_path / "run.py").read_text()
    assert "np.asarray(image, np.uint8)" in script
    swapped = script.replace(
        "np.asarray(image, np.uint8)", "np.asarray(image, np.uint8)[..., ::-1]"
    )
    (tmp_path / "run.py").write_text(swapped)
    hop, _ = run_script_hop(tmp_path, source)
    if hop.status == "not_executed":
        pytest.skip(hop.reason)
    assert (hop.name, hop.status) == ("edge", "differs")
    assert "the largest difference is" in hop.reason


@pytest.mark.nightly(seconds=60)
@pytest.mark.skipif(shutil.which("uv") is None, reason="there is no uv here")
@pytest.mark.parametrize(
    ("name", "contract", "target"),
    [
        ("hashed_ngrams", TEXTS.model_copy(update={"masked": ["email", "card"]}), EDGE),
        ("hashed_ngrams", TEXTS, OPENVINO),
        ("small_transformer", token_contract(), EDGE),
        ("small_transformer", token_contract(), OPENVINO),
        (
            "small_transformer",
            token_contract(
                tokenizer=word_piece(), columns=["a", "b"], is_pair=True, masked=["phone"]
            ),
            OPENVINO,
        ),
    ],
    ids=[
        "masked-edge",
        "bytes-openvino",
        "tokens-edge",
        "tokens-openvino",
        "masked-pairs-openvino",
    ],
)
def test_script_predicts_hostile_texts_as_the_certified_graph_does(
    name: str, contract: TextContract, target: ScriptTarget, tmp_path: Path
) -> None:
    source = trained_text_source(tmp_path / "source", name, contract)
    record = tried(write_script(tmp_path / "out", source, target))
    assert record.certified
    assert record.hop.flipped == []
    assert record.hop.max_difference is not None
    assert record.hop.max_difference <= 1e-5
    assert record.facts["installed_mb"] < (MOST_INSTALLED_MB if target is EDGE else 1000)


def tried(record: ExportRecord) -> ExportRecord:
    """Return the record; skip the test without a package index."""
    if record.hop.status == "not_executed":
        pytest.skip(record.hop.reason)
    return record


@pytest.mark.nightly(seconds=60)
@pytest.mark.skipif(shutil.which("uv") is None, reason="there is no uv here")
@pytest.mark.parametrize("is_table", [False, True])
def test_openvino_predicts_as_the_certified_graph_does_with_telemetry_off(
    is_table: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CI", raising=False)
    source = table_source(tmp_path) if is_table else image_source(tmp_path, photos())
    record = tried(write_script(tmp_path / "openvino", source, OPENVINO))
    assert record.certified
    assert (record.hop.name, record.hop.flipped) == ("openvino", [])
    assert record.hop.max_difference is not None
    assert record.hop.max_difference <= 1e-5
    assert not (tmp_path / "home/intel").exists()


@pytest.mark.nightly(seconds=60)
@pytest.mark.skipif(shutil.which("uv") is None, reason="there is no uv here")
def test_export_names_operators_that_openvino_lacks_and_writes_nothing(tmp_path: Path) -> None:
    source = planted_operator(tmp_path / "source", "MurmurHash3", "com.microsoft")
    with pytest.raises(UnavailableError, match=r"of the graph: .*MurmurHash3.*; expected none"):
        tried(write_script(tmp_path / "openvino", source, OPENVINO))
    assert not (tmp_path / "openvino").exists()
