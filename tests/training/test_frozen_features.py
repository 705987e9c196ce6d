"""Features of a frozen body: what is stored, when it is computed again, and trainings on it."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
import yaml

from slipway.config.params import load_params, parse_params
from slipway.config.training import AuditParams, TrainParams
from slipway.data.augmentation.plan import plan_from_params, write_plan
from slipway.data.splits.audit_folds import audited_rows
from slipway.data.store.packed import open_split, read_manifest
from slipway.planning.plan import describe
from slipway.planning.resource_plan import make_plan
from slipway.planning.step_memory import parameter_counts
from slipway.system import files
from slipway.system.errors import ParamsError
from slipway.training.assembly import prepare_process
from slipway.training.augmentation.offline_copies import write_copies
from slipway.training.distributed.placement import Placement, place, this_host
from slipway.training.distributed.stop_signals import Stopped
from slipway.training.frozen_features import MANIFEST, FeatureStore, frozen_body
from slipway.training.job import PROJECT_PATHS, LeftOut, TrainingData, network_spec, open_data
from slipway.training.module import TrainingModule
from slipway.training.networks.frozen_parts import FrozenBody, answer_to_features
from slipway.training.networks.initialization import initial_network
from slipway.training.networks.networks import Network, load_network
from slipway.training.short_run import EpochPrinter, train_short
from slipway.training.telemetry.progress import silence_chatter
from slipway.training.uncertainty.out_of_fold import plan_folds, predict_out_of_fold
from tests.project_params import augment_params, own_content
from tests.training.conftest import write_project
from tests.training.real_runs import kill_after, run_training, weights_digest
from tests.training.uncertainty.test_out_of_fold import split_rows

pytestmark = pytest.mark.process

FROZEN: dict[str, Any] = {
    "network": "timm/test_resnet",
    "network_arguments": {},
    "pretrained": "weights.safetensors",
    "freeze_epochs": 4,
    "epochs": 4,
    "batch_size": 30,
}


def frozen_project(root: Path, **train: Any) -> Path:
    """Write a project that trains the head of a pretrained network, without augmentation."""
    project = write_project(root, **{**FROZEN, **train})
    write_plan(project / "data/augmented", plan_from_params(augment_params(), 7))
    torch.manual_seed(5)
    safetensors.torch.save_file(
        timm.create_model("test_resnet", num_classes=7).state_dict(),
        project / "weights.safetensors",
    )
    return project


class Trained:
    """The network, data and placement of a project, as a training prepares them."""

    def __init__(self, project: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
        monkeypatch.chdir(project)
        params = load_params(project / "params.yaml").train
        self.params: TrainParams = params.model_copy(update=changes)
        self.data: TrainingData = open_data(Path("data/packed"), Path("data/augmented"))
        self.placement: Placement = place(self.params, this_host())
        spec = network_spec(self.params, self.data.manifest)
        self.network: Network = initial_network(7, self.params, spec)
        prepare_process(self.params, self.placement, self.network)

    def body(self) -> FrozenBody | str | None:
        return frozen_body(self.network, self.params, self.data.plan, self.placement)

    def store(self, root: Path = Path(".work/features")) -> FeatureStore:
        body = self.body()
        assert isinstance(body, FrozenBody)
        return FeatureStore.of(root, self.network, self.params, self.data, body, self.placement)


Prepare = Callable[..., Trained]


@pytest.fixture(name="prepare")
def _prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepare:
    project = frozen_project(tmp_path / "project")
    return lambda **changes: Trained(project, monkeypatch, **changes)


def digests(store: FeatureStore) -> dict[str, str]:
    found: dict[str, str] = json.loads((store.folder / MANIFEST).read_text())["files"]
    return found


def test_the_head_gives_to_stored_features_the_answers_of_the_whole_network(
    prepare: Prepare,
) -> None:
    trained = prepare()
    store = trained.store()
    assert store.fill("cpu").startswith("96 of each row, computed once, in")
    data, network = store.attached(), trained.network.eval()
    assert data.head == "backbone.fc"
    for split in (*data.train, data.val):
        assert split.features is not None
        features = torch.from_numpy(split.features[np.arange(len(split))])
        answers = network(torch.from_numpy(np.array(split.inputs)))
        assert features.dtype == torch.float32
        assert torch.allclose(
            answer_to_features(network, "backbone.fc")(features), answers, atol=1e-5
        )


def test_features_are_equal_to_the_last_bit_from_run_to_run_and_are_computed_once(
    prepare: Prepare,
) -> None:
    one, other = prepare().store(Path("one")), prepare().store(Path("other"))
    one.fill("cpu")
    other.fill("cpu")
    assert digests(one) == digests(other)
    assert (
        prepare(learning_rate=0.5, seed=8)
        .store(Path("one"))
        .fill("cpu")
        .endswith("an earlier training")
    )


def test_other_weights_rows_or_pixels_get_a_store_of_their_own(prepare: Prepare) -> None:
    trained = prepare()
    names = {trained.store().folder.name, prepare(batch_size=10).store().folder.name}
    assert len(names) == 1  # the recipe of the head is not part of the key
    with torch.no_grad():
        next(iter(trained.network.parameters()))[0] += 1e-3
    names.add(trained.store().folder.name)
    trained = prepare()
    splits = {**trained.data.manifest.splits}
    splits["val"] = splits["val"].model_copy(update={"files": {"inputs.npy": "0" * 64}})
    manifest = trained.data.manifest.model_copy(update={"splits": splits})
    trained.data = replace(trained.data, manifest=manifest)
    names.add(trained.store().folder.name)
    trained = prepare()
    trained.network.spec = trained.network.spec.model_copy(update={"std": [0.3]})
    names.add(trained.store().folder.name)
    names.add(prepare(max_batch_per_device=8).store().folder.name)
    assert len(names) == 5


def test_an_altered_store_is_computed_again(
    prepare: Prepare, capsys: pytest.CaptureFixture[str]
) -> None:
    store = prepare().store()
    store.fill("cpu")
    before = digests(store)
    rows = np.load(store.folder / "val.npy")
    rows[0, 0] += 1
    np.save(store.folder / "val.npy", rows)
    assert "computed once" in prepare().store().fill("cpu")
    assert "was altered, so its features are computed again" in capsys.readouterr().out
    assert (
        digests(store)
        == before
        == {name: files.sha256_file(store.folder / name) for name in before}
    )


def test_a_stopped_run_keeps_the_parts_that_were_finished(
    prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipway.training.frozen_features._PART_ROWS", 64)
    whole = prepare().store(Path("whole"))
    whole.fill("cpu")
    store, calls = prepare().store(), iter([0, 0, 15])
    with pytest.raises(Stopped):
        store.fill("cpu", lambda: next(calls))
    finished = {path.name: path.stat().st_ino for path in (store.folder / "parts").iterdir()}
    assert sorted(finished) == ["train-0.npy", "train-64.npy"]
    again = iter(range(100))
    store.fill("cpu", lambda: next(again) * 0)
    assert next(again) == 2  # one part of the training rows and one of those for validation
    assert digests(store) == digests(whole)
    assert not (store.folder / "parts").exists()


def test_the_stores_that_were_used_last_stay(
    prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipway.training.frozen_features._MOST_STORES", 2)
    stores = [prepare(max_batch_per_device=size).store() for size in (8, 9, 10)]
    stores[0].fill("cpu")
    stores[1].fill("cpu")
    os.utime(stores[1].folder, (1, 1))  # long ago, for clocks that tick slowly
    stores[0].fill("cpu")
    stores[2].fill("cpu")
    assert [store.folder.exists() for store in stores] == [True, False, True]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"freeze_epochs": 3}, None),
        ({"strategy": "fsdp"}, "strategy 'fsdp' divides the body over processes"),
        ({"compile": True}, "train.compile compiles the whole network"),
        (
            {"network_arguments": {"drop_rate": 0.2}},
            "train.network_arguments drop values at random before the head",
        ),
        ({"network_arguments": {"drop_path_rate": 0.2}}, FrozenBody("backbone.fc", 96)),
    ],
)
def test_a_body_computes_in_every_epoch_only_where_its_features_would_not_be_the_same(
    prepare: Prepare, changes: dict[str, Any], reason: object
) -> None:
    trained = prepare(**changes)
    assert trained.body() == reason


def test_augmentation_in_every_epoch_forbids_a_store_and_offline_copies_alone_do_not(
    prepare: Prepare,
) -> None:
    trained = prepare()
    folder = Path("data/augmented")
    plan = plan_from_params(augment_params(horizontal_flip=0.5), 7)
    write_plan(folder, plan)
    trained.data = open_data(Path("data/packed"), folder)
    assert trained.body() == "augment.horizontal_flip draws new rows in each"
    copies = write_copies(trained.data.train[0], plan, 2, 8, folder / "train")
    write_plan(folder, plan_from_params(augment_params(), 7).model_copy(update={"offline": copies}))
    trained.data = open_data(Path("data/packed"), folder)
    store = trained.store()
    store.fill("cpu")
    assert [len(split.features or []) for split in store.attached().train] == [150, 300]
    assert sorted(digests(store)) == ["copies.npy", "train.npy", "val.npy"]


def epochs_of(trained: Trained, data: TrainingData, folder: Path) -> list[dict[str, float]]:
    """Train in place for all epochs, and return their metrics."""
    found: list[dict[str, float]] = []

    class Metrics(EpochPrinter):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            assert isinstance(pl_module, TrainingModule)
            found.append(dict(pl_module.epoch_metrics))

    silence_chatter()
    printer = Metrics("network", "the rows")
    train_short(trained.network, 7, trained.params, trained.placement, data, [printer], folder)
    return found


@pytest.mark.parametrize("changes", [{}, {"ema_decay": 0.9, "repeat_every_steps": 2}])
def test_metrics_of_every_epoch_equal_those_of_a_body_that_computes_in_each(
    prepare: Prepare, tmp_path: Path, changes: dict[str, Any]
) -> None:
    trained = prepare(**changes)
    store = trained.store()
    store.fill("cpu")
    on_features = epochs_of(trained, store.attached(), tmp_path)
    again = prepare(**changes)
    in_each = epochs_of(again, again.data, tmp_path)
    assert len(on_features) == len(in_each) == 4
    for one, other in zip(on_features, in_each, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    weights = again.network.state_dict()
    for name, value in trained.network.state_dict().items():
        assert torch.allclose(value.float(), weights[name].float(), atol=1e-5)


def test_rows_left_out_keep_their_features(prepare: Prepare) -> None:
    trained = prepare()
    store = trained.store()
    store.fill("cpu")
    whole = store.attached()
    part = LeftOut(0, 3, seed=7).without(whole.train)[0]
    positions = [whole.train[0].ids.index(name) for name in part.ids]
    assert 0 < len(part) < len(whole.train[0])
    assert part.features is not None
    assert np.array_equal(part.features[np.arange(len(part))], whole.train[0].read[positions])


def test_the_folds_of_an_audit_share_one_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = frozen_project(tmp_path / "project", freeze_epochs=4, epochs=4)
    monkeypatch.chdir(project)
    packed, manifest = project / "data/packed", read_manifest(project / "data/packed")
    rows = audited_rows(split_rows(packed))
    ids = [name for split in ("train", "val") for name in open_split(packed, manifest, split).ids]
    order = [rows["id"].to_pylist().index(name) for name in ids]
    training = plan_folds(
        7,
        load_params(project / "params.yaml").train,
        AuditParams(folds=2, epochs=6),
        rows.take(order),
        packed=packed,
        augmented=project / "data/augmented",
        root=project,
    )
    assert training.params.freeze_epochs == 6
    answers = predict_out_of_fold(training, tmp_path)
    assert answers.shape == (211, 2)
    assert len(list((project / ".work/features").iterdir())) == 1
    printed = capsys.readouterr().out
    assert printed.count("computed once") == 1
    assert printed.count("computed by an earlier training") == 1


def test_plan_counts_the_trained_head_and_the_features_of_a_frozen_body(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = frozen_project(tmp_path / "project")
    monkeypatch.chdir(project)
    params = load_params(project / "params.yaml")
    plan = make_plan(params, PROJECT_PATHS, this_host(), 1.0)
    assert not plan.findings.mismatches
    assert plan.network is not None
    assert plan.seconds is not None
    assert parameter_counts(plan.network)[0] == 96 * 2 + 2
    assert plan.disk["features"] == 4 * 96 * (150 + 61)
    assert plan.seconds.features > 0
    text = describe(plan, params)
    assert "features  96 of each row, computed once" in text
    assert " s of features, " in text


def test_an_audit_of_a_frozen_body_may_have_fewer_epochs_than_the_training() -> None:
    changed = own_content()
    changed["train"] |= {"network": "timm/resnet18", "network_arguments": {}, "pretrained": "hub"}
    changed["train"] |= {"epochs": 10, "freeze_epochs": 10, "warmup_epochs": 1.0}
    changed["audit"] |= {"folds": 3, "epochs": 5}
    assert parse_params(changed).train.freezes_body
    changed["train"]["freeze_epochs"] = 9
    with pytest.raises(ParamsError, match=r"freeze_epochs: 1 # is 9, expected at most audit"):
        parse_params(changed)


def test_a_killed_training_on_features_ends_with_the_weights_of_an_uninterrupted_one(
    tmp_path: Path,
) -> None:
    whole, killed = (frozen_project(tmp_path / name) for name in ("whole", "killed"))
    done = run_training(whole)
    assert done.returncode == 0, done.stderr
    assert "features  96 of each row, computed once, in" in done.stdout
    kill_after(killed, "epoch 2/4")
    resumed = run_training(killed)
    assert "resumed   after epoch" in resumed.stdout
    assert "features  96 of each row, computed by an earlier training" in resumed.stdout
    assert weights_digest(killed) == weights_digest(whole)


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        ("ddp", "32-true"),
        pytest.param("deepspeed_stage_1", "32-true", marks=pytest.mark.nightly),
        pytest.param("deepspeed_stage_2", "bf16-mixed", marks=pytest.mark.nightly),
    ],
)
def test_two_processes_share_the_rows_and_train_the_same_head(
    tmp_path: Path, strategy: str, precision: str
) -> None:
    single = frozen_project(tmp_path / "single")
    pair = frozen_project(tmp_path / "pair", strategy=strategy, precision=precision, devices=2)
    for project in (single, pair):
        done = run_training(project)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("features  96 of each row, computed once") == 1
    one, two = (load_network(path / "artifacts/model").state_dict() for path in (single, pair))
    for name, value in one.items():
        tolerance = 0 if "fc" not in name else 0.02 if precision == "bf16-mixed" else 1e-4
        assert torch.allclose(two[name].float(), value.float(), atol=tolerance), name


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["ddp", "deepspeed_stage_1", "deepspeed_stage_2"])
def test_one_process_resumes_the_training_of_a_head_that_two_began(
    tmp_path: Path, strategy: str
) -> None:
    alone = frozen_project(tmp_path / "alone", strategy="single")
    assert run_training(alone).returncode == 0
    project = frozen_project(tmp_path / "pair", strategy=strategy, devices=2)
    kill_after(project, "epoch 2/4")
    content = yaml.safe_load((project / "params.yaml").read_text())
    content["train"] |= {"strategy": "single", "devices": 1}
    files.write_text(project / "params.yaml", yaml.safe_dump(content))
    done = run_training(project)
    assert done.returncode == 0, done.stderr
    assert "resumed   after epoch" in done.stdout
    expected, found = (
        load_network(path / "artifacts/model").state_dict() for path in (alone, project)
    )
    for name, value in expected.items():
        assert torch.allclose(found[name].float(), value.float(), atol=1e-4), name


def test_a_training_whose_body_computes_in_every_epoch_says_why(tmp_path: Path) -> None:
    project = frozen_project(tmp_path, epochs=1, freeze_epochs=1, warmup_epochs=0.0)
    plan = plan_from_params(augment_params(erasing=0.2), 7)
    write_plan(project / "data/augmented", plan)
    done = run_training(project)
    assert done.returncode == 0, done.stderr
    reason = "augment.erasing draws new rows in each"
    assert f"features  computed in every epoch, because {reason}" in done.stdout
    assert not (project / ".work/features").exists()
