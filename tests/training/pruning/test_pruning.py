"""Tests of pruning: silent channels are removed without effect, and zeros stay zeros."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from slipway.artifacts.uncertainty import Calibration
from slipway.config.params import load_params
from slipway.config.sections import PruneParams
from slipway.inputs.columns import ColumnContract
from slipway.inputs.texts import TextContract
from slipway.system import files
from slipway.system.errors import IntegrityError, ParamsError, SchemaError
from slipway.training.job import open_data
from slipway.training.networks.networks import (
    Network,
    build_network,
    example_rows,
    read_model_manifest,
    save_model,
)
from slipway.training.pruning.channels import find_chains, prune_channels, width_left
from slipway.training.pruning.result import load_pruned, pruned_network, read_pruned, save_pruned
from slipway.training.pruning.run import KeepZeros, PruningResult, magnitude_masks, prune
from tests import warm_starts
from tests.model_manifests import model_manifest
from tests.packed_tables import fit_column
from tests.training.conftest import ARGUMENTS, CONTRACT, ROOT, spec, write_project
from tests.user_functions import WriteFunctions, _write_functions  # noqa: F401 - a fixture

STRUCTURED = PruneParams(kind="structured", sparsity=0.5, epochs=2, learning_rate=0.002)
MAGNITUDE = PruneParams(kind="magnitude", sparsity=0.75, epochs=1, learning_rate=0.002)
CUT = ("backbone.stages.0", "backbone.stages.1")


def drawn(seed: int = 3, **changes: Any) -> Network:
    """Return a network whose norms scale each channel differently, as after a training."""
    torch.manual_seed(seed)
    network = build_network(spec(**changes))
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d | nn.GroupNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    return network.eval()


def images(num_rows: int = 5, size_px: int = 8) -> Tensor:
    return torch.randint(
        0,
        256,
        (num_rows, size_px, size_px, 1),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(1),
    )


def write_pruned_project(root: Path) -> Path:
    """Write a project for `python -m slipway.stages.prune`."""
    write_project(root)
    network = drawn()
    save_model(root / "artifacts/model", model_manifest(network.spec), network.state_dict())
    return root


@pytest.fixture(name="project", scope="module")
def _project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pruned_project(tmp_path_factory.mktemp("pruning"))


def pruned(project: Path, wanted: PruneParams) -> PruningResult:
    params = load_params(project / "params.yaml")
    data = open_data(project / "data/packed", project / "data/augmented")
    model = project / "artifacts/model"
    return prune(params.seed, params.train, wanted, params.evaluate, data, model)


@pytest.fixture(name="structured", scope="module")
def _structured(project: Path) -> PruningResult:
    return pruned(project, STRUCTURED)


def test_chains_contain_channels_between_two_layers_but_none_of_a_shortcut() -> None:
    chains = {chain.maker: chain.reader for chain in find_chains(drawn())}
    assert chains == {f"{block}.conv1.weight": f"{block}.conv2.weight" for block in CUT}


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "size_px"),
    [
        ("test_resnet", 32),
        pytest.param("test_vit", 160, marks=pytest.mark.nightly),
        pytest.param("test_efficientnet", 32, marks=pytest.mark.nightly),
    ],
)
def test_removing_silent_channels_keeps_the_outputs_of_a_timm_network(
    name: str, size_px: int
) -> None:
    contract = CONTRACT.model_copy(update={"size_px": size_px})
    network = drawn(name=f"timm/{name}", arguments={}, input=contract)
    removes_silent_channels(network, images(size_px=size_px))


def test_removing_silent_channels_keeps_the_outputs_of_a_built_in_network() -> None:
    removes_silent_channels(drawn(), images())


TWO_LAYERS = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self, input_shape, num_outputs):
        super().__init__(nn.Linear(*input_shape, 32), nn.ReLU(), nn.Linear(32, num_outputs))
"""


@pytest.mark.parametrize("task", ["table_classification", "text_classification"])
def test_removing_silent_channels_keeps_the_outputs_of_a_user_network_for_rows(
    task: str, write_functions: WriteFunctions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_functions("two", {"layers.py": TWO_LAYERS})
    columns = ColumnContract(
        kind="columns", columns=[fit_column("x", [1.0, 2.0, 9.0]), fit_column("y", [3.0, 5.0, 6.0])]
    )
    texts = TextContract(kind="texts", columns=["text"], max_bytes=16, max_characters=None)
    inputs = columns if task.startswith("table") else texts
    network = drawn(name="two.layers:Net", arguments={}, task=task, input=inputs, mean=[], std=[])
    rows = example_rows(network.spec, 5)
    removes_silent_channels(network, torch.randint_like(rows, 1, 9))


def removes_silent_channels(network: Network, rows: Tensor) -> None:
    """Silence half of the channels, and check that pruning removes exactly these.

    Control: without silent channels, pruning changes the outputs.
    """
    weights, _ = prune_channels(network, 0.5)
    assert not torch.allclose(pruned_network(network.spec, weights)(rows), network(rows), atol=1e-3)
    state = network.state_dict()
    for chain in find_chains(network):
        for name in chain.first:
            if not name.endswith("running_var"):
                state[name][::2] = 0
    weights, widths = prune_channels(network, 0.5)
    assert widths
    assert sum(map(Tensor.numel, weights.values())) < sum(map(Tensor.numel, state.values()))
    assert torch.allclose(pruned_network(network.spec, weights)(rows), network(rows), atol=1e-5)


@pytest.mark.parametrize(
    ("width", "share", "left"),
    [(32, 0.5, 16), (32, 0.55, 16), (32, 0.9, 8), (32, 0.05, 32), (20, 0.1, 20), (6, 0.5, 6)],
)
def test_width_left_rounds_up_to_a_multiple_of_8_but_not_above_the_width(
    width: int, share: float, left: int
) -> None:
    assert width_left(width, share) == left


def test_structured_pruning_refuses_group_normalisation() -> None:
    network = drawn(arguments=ARGUMENTS | {"normalisation": "group"})
    with pytest.raises(ParamsError, match="no layer of 'small_resnet' has only one reader"):
        prune_channels(network, 0.5)


def test_a_sparsity_that_removes_no_channel_is_refused() -> None:
    with pytest.raises(
        ParamsError, match=r"prune\.sparsity is 0\.1, which removes no channel of 'small_resnet'"
    ):
        prune_channels(drawn(), 0.1)


def test_magnitude_masks_cover_the_smallest_weights_of_all_layers() -> None:
    network = drawn()
    masks = magnitude_masks(network, 0.75)
    weights = dict(network.named_parameters())
    assert all(weights[name].ndim > 1 for name in masks)
    kept = torch.cat([weights[name][mask].abs() for name, mask in masks.items()])
    gone = torch.cat([weights[name][~mask].abs() for name, mask in masks.items()])
    assert len(gone) == round(0.75 * (len(kept) + len(gone)))
    assert gone.max() <= kept.min()


class _MaskedWeights(pl.Callback):
    """Records the largest absolute masked weight at the end of each batch."""

    def __init__(
        self, network: nn.Module, masks: dict[str, Tensor], zeros: KeepZeros | None
    ) -> None:
        self._weights, self._masks, self._zeros = dict(network.named_parameters()), masks, zeros
        self.largest: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        if self._zeros:
            self._zeros.apply()
        self.largest.append(
            max(
                float(self._weights[name].detach()[~mask].abs().max())
                for name, mask in self._masks.items()
            )
        )


@pytest.mark.process
@pytest.mark.parametrize("keeps", [True, False])
def test_fine_tuning_keeps_pruned_weights_at_zero_after_every_step(
    project: Path, monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    """Control: without `KeepZeros`, the training would change the zeros."""
    recorded: list[_MaskedWeights] = []

    def zeros(network: nn.Module, masks: dict[str, Tensor]) -> pl.Callback:
        kept = KeepZeros(network, masks)
        kept.apply()
        recorded.append(_MaskedWeights(network, masks, kept if keeps else None))
        return recorded[-1]

    monkeypatch.setattr("slipway.training.pruning.run.KeepZeros", zeros)
    found = pruned(project, MAGNITUDE)
    (weights,) = recorded
    assert len(weights.largest) == 150 // 32
    assert (max(weights.largest) == 0) is keeps
    assert (found.manifest.num_zeros >= 0.7 * found.manifest.num_parameters) is keeps


def test_magnitude_pruning_keeps_shapes_and_shrinks_only_the_compressed_size(project: Path) -> None:
    found = pruned(project, MAGNITUDE)
    assert (found.manifest.kind, found.manifest.widths, found.num_parameters) == (
        "magnitude",
        {},
        found.manifest.num_parameters,
    )
    assert found.bytes["before"] == found.bytes["after"]
    assert found.bytes["after_compressed"] < 0.5 * found.bytes["before_compressed"]
    assert "parameters are zero, 75.0% requested" in found.text()


def test_structured_pruning_reports_the_removed_fraction_of_channels(
    structured: PruningResult,
) -> None:
    widths = {
        name: (width.before, width.after) for name, width in structured.manifest.widths.items()
    }
    assert widths == {f"{CUT[0]}.conv1": (16, 8), f"{CUT[1]}.conv1": (32, 16)}
    report = structured.report()
    assert (report["kind"], report["removed_fraction"]) == ("structured", 0.5)
    assert report["parameters"]["after"] < report["parameters"]["before"]
    assert report["bytes"]["after"] < report["bytes"]["before"]
    assert (report["validation"]["metric"], report["validation"]["rows"]) == ("accuracy", 61)
    assert structured.manifest.requested.strategy == "auto"
    assert structured.manifest.actual.strategy == "single"
    assert (
        "50.0% of the channels of the narrowed layers removed, 50.0% requested" in structured.text()
    )


def test_fine_tuning_improves_the_validation_metric(structured: PruningResult) -> None:
    # The model has its initial weights, so fine-tuning can improve it.
    assert structured.metric.after > structured.metric.before


def test_a_loaded_pruned_network_gives_the_outputs_that_were_calibrated(
    structured: PruningResult, project: Path, tmp_path: Path
) -> None:
    save_pruned(
        tmp_path / "pruned", structured.manifest, structured.weights, structured.fitted.score
    )
    digest = read_model_manifest(project / "artifacts/model").weights_sha256
    card = read_pruned(tmp_path / "pruned", digest)
    assert card == structured.manifest
    network = load_pruned(tmp_path / "pruned", structured.manifest)
    logits = pruned_network(structured.manifest.network, structured.weights)(images())
    assert isinstance(card.calibration, Calibration)
    assert torch.equal(
        network(images())[0], torch.softmax(logits / card.calibration.temperature, dim=1)
    )
    with pytest.raises(SchemaError, match="the model has 000000000000"):
        read_pruned(tmp_path / "pruned", "0" * 64)
    path = tmp_path / "pruned/weights.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x00")
    with pytest.raises(IntegrityError, match="dvc repro prune"):
        load_pruned(tmp_path / "pruned", structured.manifest)


@pytest.mark.parametrize("change", ["missing", "unknown", "narrow"])
def test_pruned_weights_that_fit_no_network_are_refused(
    structured: PruningResult, change: str
) -> None:
    weights, name = dict(structured.weights), f"{CUT[0]}.conv1.weight"
    value = weights.pop(name)
    weights |= {
        "missing": {},
        "unknown": {f"{CUT[0]}.conv9.weight": value},
        "narrow": {name: value[:-1]},
    }[change]
    with pytest.raises(
        SchemaError, match="the pruned weights do not fit the network 'small_resnet'"
    ):
        pruned_network(structured.manifest.network, weights)


def set_prune(project: Path, prune: PruneParams, *variants: str) -> None:
    params = load_params(project / "params.yaml").model_dump(mode="json")
    params["prune"] = prune.model_dump()
    params["export"]["variants"] += variants
    files.write_json(project / "params.yaml", params)


def start_stage(project: Path) -> warm_starts.Process:
    return warm_starts.start(
        ["slipway.stages.prune"], project, {**os.environ, "PYTHONPATH": str(ROOT)}
    )


@pytest.mark.process
def test_killed_pruning_leaves_no_files_and_a_new_run_writes_the_same_bytes(
    structured: PruningResult, tmp_path: Path
) -> None:
    project = write_pruned_project(tmp_path)
    set_prune(project, STRUCTURED, "pruned")
    with start_stage(project) as process:
        assert process.stdout is not None
        assert any("epoch 1/2" in line for line in process.stdout)
        os.killpg(process.pid, signal.SIGKILL)
    assert not (project / "artifacts/pruned").exists()
    with start_stage(project) as process:
        assert process.stdout is not None
        process.stdout.read()
    assert process.returncode == 0
    assert json.loads(
        (project / "artifacts/pruned/model.json").read_bytes()
    ) == structured.manifest.model_dump(mode="json")
    assert (
        files.sha256_file(project / "artifacts/pruned/weights.safetensors")
        == structured.manifest.weights_sha256
    )
    assert json.loads((project / "reports/prune.json").read_bytes()) == structured.report()


def test_the_prune_stage_loads_no_torch_and_records_it_if_nothing_is_to_prune(
    project: Path,
) -> None:
    program = (
        "import sys, runpy; runpy.run_module('slipway.stages.prune', run_name='__main__'); "
        "sys.exit('torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == ""
    assert [path.name for path in (project / "artifacts/pruned").iterdir()] == ["model.json"]
    assert read_pruned(project / "artifacts/pruned", "0" * 64) is None
    assert json.loads((project / "reports/prune.json").read_bytes()) == {"kind": None}
