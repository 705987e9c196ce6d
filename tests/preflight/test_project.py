"""Preflight: every mistake is named at once, and the reports of the last run stay."""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from slipway.config.training import TrainParams
from slipway.preflight.project import check_project, repository_mistakes
from slipway.preflight.training import needs_the_machine
from slipway.system.errors import ParamsError, UnavailableError
from slipway.training.distributed.placement import TrainingHost, place
from tests.conftest import ROOT
from tests.end_to_end.project import copy_checkout
from tests.project_params import of_kind, own_content
from tests.user_functions import WriteFunctions, _write_functions  # noqa: F401 - a fixture

CONTENT: dict[str, Any] = own_content()
WINE = "data/demo/wine.csv"


@pytest.fixture(autouse=True)
def _in_a_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of its own with the embedded data, so that nothing of the checkout is written to."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "demo").symlink_to(ROOT / "data" / "demo")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRAIN_LAUNCHER", raising=False)


def write_params(**changes: Any) -> None:
    """The project's own params with dotted keys changed: write_params(train__epochs=3)."""
    content = of_kind(CONTENT, changes.get("data__task", CONTENT["data"]["task"]))
    for key, value in changes.items():
        *place_, last = key.split("__")
        section = content
        for part in place_:
            section = section[part]
        section[last] = value
    Path("params.yaml").write_text(yaml.dump(content, Dumper=yaml.CSafeDumper))


def refusal(**changes: Any) -> str:
    write_params(**changes)
    with pytest.raises(ParamsError) as raised:
        check_project()
    return str(raised.value)


def test_the_projects_own_params_are_accepted() -> None:
    write_params()
    check_project()


def test_folder_without_git_is_refused_with_both_remedies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        tempfile.TemporaryDirectory() as outside
    ):  # the other tests' folders lie in the checkout, which is in git
        monkeypatch.chdir(outside)
        (refusal,) = repository_mistakes()
        assert "is in no git repository" in refusal
        assert "git init" in refusal
        assert "core.no_scm true" in refusal
        Path(".dvc").mkdir()
        Path(".dvc/config.local").write_text("[core]\n    no_scm = true\n")
        assert repository_mistakes() == []
        Path(".dvc/config.local").unlink()
        Path(".git").mkdir()
        assert repository_mistakes() == []


def test_a_project_with_braces_in_its_path_is_refused_with_a_command_that_renames_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "p {1}" / "x"
    folder.mkdir(parents=True)
    (folder / "data").symlink_to(tmp_path / "data")
    monkeypatch.chdir(folder)
    text = refusal()
    assert f"the path of the project, {str(folder)!r}, has braces, which DVC cannot handle" in text
    command = next(line for line in text.splitlines() if "rename this one: " in line)
    subprocess.run(["bash", "-c", command.partition("rename this one: ")[2]], check=True)
    monkeypatch.chdir(tmp_path / "p (1)" / "x")
    check_project()


MISTAKES: list[tuple[str, Any, str]] = [
    ("clean__max_bad_fracton", 0.1, "did you mean 'max_bad_fraction'?"),
    ("train__epochs", "ten", "train.epochs: found 'ten'"),
    ("split__on_leak", "warn", "split.on_leak: found 'warn'"),
    (
        "split__time_cuts",
        ["2024-08-01", "2024-06-01"],
        "expected the time at which val begins, then a later",
    ),
    ("split__time_cuts", ["x", "y"], "split.time_cuts holds 'x', 'y', expected ISO 8601 dates"),
    ("split__time_cuts", ["", ""], "split.time_cuts holds '', ''"),
    ("split__time_cuts", ["2024-02-30", "2024-06-30"], "split.time_cuts holds '2024-02-30'"),
    ("train__network", "small_resnt", "did you mean 'small_resnet'?"),
    ("train__network_arguments", {"widht": 32}, "did you mean 'width'?"),
    ("train__pretrained", "weights.pth", "pretrained is 'weights.pth', but network is"),
    ("train__loss", "huber", "which needs huber_delta"),
    ("evaluate__gates", {"acuracy": {"min": 0.9, "max": None}}, "did you mean 'accuracy'?"),
    ("data__path", "data/photos", "data.path 'data/photos' does not exist"),
    ("data__path", "s3://bucket/photos", "is an address"),
    ("data__target_column", "lable", "did you mean 'label'?"),
    ("data__image_column", "picture", "data.image_column is 'picture'"),
    ("data__group_column", "person", "data.group_column is 'person'"),
    ("data__checksums", "digests.txt", "digests.txt"),
    ("precompute__transform", "foo.bar", "does not name a function"),
    ("precompute__transform", "foo.bar:crop", "names the module foo.bar"),
    ("augment__horizontal_flip", 0.5, "augment.forbid names 'horizontal_flip'"),
    ("evaluate__slices", ["siz"], "evaluate.slices names unknown columns"),
    ("evaluate__reference_model", "artifacts/relased", "where there is no bundle.json"),
]


@pytest.mark.parametrize(("key", "value", "text"), MISTAKES)
def test_preflight_refuses_each_mistake_before_any_stage_runs(
    key: str, value: Any, text: str
) -> None:
    assert text in refusal(**{key: value})


SEARCH: dict[str, Any] = {
    "method": "tpe",
    "metric": "accuracy",
    "direction": "maximize",
    "budget": {"trials": 5, "epochs": None, "minutes": None},
    "halving": None,
    "workers": 1,
    "seed": 1,
    "space": {"train.learning_rate": {"log_range": [0.001, 0.01]}},
}


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"space": {}}, ["search.space", "at least 1"]),
        (
            {"space": {"train.lerning_rate": {"choice": [1]}}},
            ["did you mean 'train.learning_rate'"],
        ),
        ({"space": {"train.optimizer": {"choice": ["adam"]}}}, ["did you mean 'adamw'"]),
        ({"budget": {"trials": 0, "epochs": None, "minutes": None}}, ["search.budget.trials"]),
        ({"budget": {"trials": None, "epochs": 3, "minutes": None}}, ["Write at least 30"]),
        ({"metric": "rmse"}, ["search.metric is 'rmse'", "measures accuracy and loss"]),
    ],
)
def test_the_section_search_is_checked_with_the_project_before_a_search(
    changes: dict[str, Any], parts: list[str]
) -> None:
    write_params(search=SEARCH)
    check_project(with_search=True)
    write_params(search=SEARCH | changes, data__path="data/photos")
    with pytest.raises(ParamsError, match=r"data\.path 'data/photos' does not exist") as raised:
        check_project(with_search=True)
    for part in parts:
        assert part in str(raised.value)


def test_a_run_of_the_stages_does_not_depend_on_the_space_of_a_search() -> None:
    write_params(search=SEARCH | {"metric": "rmse"})
    check_project()


def test_folds_with_split_folders_are_refused_as_the_stage_does() -> None:
    for split in ("train", "val", "test"):
        for label in "ab":
            folder = Path("photos", split, label)
            folder.mkdir(parents=True)
            (folder / "1.png").write_bytes(b"")
    text = refusal(data__path="photos", split__folds=5)
    assert "split.folds is 5, but the given split already says which rows are val." in text
    write_params(data__path="photos")
    check_project()
    write_params(data__path="photos", data__split_folders="pool", split__folds=5)
    check_project()


def test_time_cuts_with_shards_that_name_splits_are_refused() -> None:
    Path("shards").mkdir()
    table = pa.table({"image": [b"x"], "label": ["a"], "day": [1.0]})
    for split in ("train", "test"):
        pq.write_table(table, f"shards/{split}-00000-of-00001.parquet")
    changes = {"data__path": "shards", "data__time_column": "day", "split__time_cuts": ["1", "2"]}
    text = refusal(**changes)
    assert "split.time_cuts is ['1', '2'], but the given split already says where val" in text
    write_params(**changes | {"data__split_folders": "pool"})
    check_project()


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("data__checksums", "a\0b", "data.checksums cannot be used: embedded null byte"),
        ("data__path", "a\0b", "a\\x00b"),
        ("data__checksums", "x" * 5000, "File name too long"),
        ("data__path", "x" * 5000, "xxx"),
        ("evaluate__reference_model", "x" * 5000, "xxx"),
    ],
)
def test_a_path_that_cannot_exist_is_refused_by_the_name_of_its_key(
    key: str, value: str, text: str
) -> None:
    said = refusal(**{key: value})
    assert text in said
    assert key.replace("__", ".") in said


def test_data_without_permission_is_refused_once_by_its_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "data/photos/cats")

    monkeypatch.setattr("slipway.data.sources.sources.read_samples", refused)
    monkeypatch.setattr("slipway.preflight.data.check_slice_names", refused)
    said = refusal(evaluate__slices=["size"])
    assert said.startswith("params.yaml has 1 mistake:\n")
    assert "data.path: 'data/photos/cats' cannot be read: Permission denied." in said


@pytest.mark.process
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"network": "timm/resnet18x"}, "did you mean 'timm/resnet18'"),
        ({"network": "timm/resnet10t", "network_arguments": {"nonsense": 1}}, "nonsense"),
        ({"network": "timm/vit_tiny_patch16_224"}, "precompute.image_size_px"),
        ({"network": "timm/resnet10t", "pretrained": "weights.safetensors"}, "which is not a file"),
        ({"network": "timm/resnet10t", "pretrained": "params.yaml"}, "expected 'hub' or a file"),
    ],
)
def test_a_network_of_timm_that_cannot_be_built_is_refused(
    changes: dict[str, Any], text: str
) -> None:
    train = {"network_arguments": {}} | changes
    assert text in refusal(**{f"train__{key}": value for key, value in train.items()})


@pytest.mark.process
def test_a_network_of_timm_that_cannot_be_frozen_is_refused() -> None:
    import safetensors.torch
    import timm

    weights = timm.create_model("poolformer_s12", num_classes=2).state_dict()
    safetensors.torch.save_file(weights, "weights.safetensors")
    network = {
        "train__network": "timm/poolformer_s12",
        "train__network_arguments": {},
        "train__pretrained": "weights.safetensors",
        "precompute__image_size_px": 32,
        "precompute__channels": 3,
    }
    write_params(**network)
    check_project()
    text = refusal(**network, train__freeze_epochs=1)
    assert "timm does not define the parts of 'timm/poolformer_s12'" in text


@pytest.mark.process
def test_structured_pruning_that_removes_no_channel_is_refused() -> None:
    pruned = {
        "prune__kind": "structured",
        "export__variants": ["fp32", "fp16", "pruned"],
        "verify__max_metric_loss": {"fp16": 0.01, "pruned": 0.05},
    }
    write_params(**pruned)
    check_project()
    text = refusal(**pruned, prune__sparsity=0.01)
    assert "prune.sparsity is 0.01, which removes no channel of 'small_resnet'" in text
    timm = {"train__network": "timm/resnet10t", "train__network_arguments": {}}
    text = refusal(**pruned, **timm, precompute__image_size_px=32, prune__sparsity=0.01)
    assert "prune.sparsity is 0.01, which removes no channel of 'timm/resnet10t'" in text


# The tests run on machines with a GPU and without.
@pytest.mark.process
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"accelerator": "cpu", "precision": "16-mixed"}, "train.precision is '16-mixed'"),
        ({"strategy": "single", "devices": 2, "accelerator": "cpu"}, "make 2 processes"),
        ({"accelerator": "gpu", "devices": 64}, "GPU"),
        ({"num_nodes": 2}, "train.num_nodes is 2"),
        ({"accelerator": "cpu", "devices": 3}, "which 3 processes cannot share equally"),
        (
            {"accelerator": "cpu", "strategy": "deepspeed_stage_1", "channels_last": True},
            "train.channels_last is true",
        ),
    ],
)
def test_devices_that_this_machine_cannot_have_are_refused(
    changes: dict[str, Any], text: str
) -> None:
    assert text in refusal(**{f"train__{key}": value for key, value in changes.items()})


def test_machine_is_not_checked_with_a_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRAIN_LAUNCHER", "srun")
    write_params(train__num_nodes=2)
    check_project()


def test_a_logger_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    assert "pip install 'slipway-ml[loggers]'" in refusal(train__loggers=["mlflow"])


def test_a_required_engine_that_cannot_be_built_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    why = "slipway.runtimes.compilation.why_unavailable"
    monkeypatch.setattr(why, lambda _provider: "no NVIDIA driver")
    assert "compile.require is true" in refusal(compile__require=True)
    monkeypatch.setattr(why, lambda _provider: None)
    check_project()


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("def crop(image, box): return image", "(image, box), expected one image"),
        ("def crop(): return None", "expected one image"),
        ("def cut(image): return image", "has no function 'crop'"),
        ("import nowhere_at_all", "cannot be imported"),
        ("import sys; sys.exit(0)", "importing own_functions calls sys.exit(0)"),
        ("crop = 3", "is int, expected a function"),
    ],
)
def test_a_transform_that_cannot_be_called_with_an_image_is_refused(
    source: str, text: str, write_functions: WriteFunctions
) -> None:
    write_functions("own_functions", {"__init__.py": source})
    assert text in refusal(precompute__transform="own_functions:crop")


@pytest.mark.parametrize(
    "source",
    ["def crop(image): return image", "def crop(image, box=None, *rest, **named): return image"],
)
def test_a_transform_that_takes_one_image_is_accepted(
    source: str, write_functions: WriteFunctions
) -> None:
    write_functions("own_functions", {"__init__.py": source})
    write_params(precompute__transform="own_functions:crop")
    check_project()


def test_a_split_file_that_dvc_would_not_notice_is_refused() -> None:
    Path("splits.csv").write_text("row,split\n0,train\n")
    expected = "is outside data.path, so DVC would not notice its changes. Add it to `deps` of the"
    assert expected in refusal(data__split_file="splits.csv")
    Path("dvc.yaml").write_text(yaml.safe_dump({"stages": {"clean": {"deps": ["./splits.csv"]}}}))
    write_params(data__split_file="splits.csv")
    check_project()
    assert "splits.txt' is not a file that ends in" in refusal(data__split_file="splits.txt")


def test_every_mistake_of_every_section_is_named_at_once() -> None:
    text = refusal(
        clean__max_pixel=3,
        split__folds=3,
        data__split_column="part",
        precompute__transform="foo.bar:crop",
        augment__vertical_flip=0.5,
        compile__variant="int8_tensorrt",
        export__variants=["fp32"],
    )
    assert text.startswith("params.yaml has 6 mistakes:\n")
    for part in (
        "clean.max_pixel: unknown key",
        "split.folds is 3, but",
        "data.split_column is 'part'",
        "names the module foo.bar",
        "augment.vertical_flip is 0.5",
        "compile.variant is 'int8_tensorrt'",
    ):
        assert part in text


def test_preflight_checks_table_columns_by_the_header_only(tmp_path: Path) -> None:
    from tests.end_to_end.project import shown_params

    changes = {
        f"{section}__{key}": value
        for section, values in shown_params()[1].items()
        for key, value in values.items()
    } | {"train__network": "tabm", "train__network_arguments": {}}
    write_params(**changes)
    check_project()
    header, *_ = (ROOT / changes["data__path"]).read_text().splitlines()
    (tmp_path / "own.csv").write_text(header + '\n1,"a quote that a whole reading would refuse\n')
    write_params(**changes | {"data__path": "own.csv"})
    check_project()
    assert "did you mean" in refusal(
        **changes | {"data__target_column": changes["data__target_column"] + "s"}
    )


HOSTS = [TrainingHost(0, True, None)]


@pytest.mark.parametrize("host", HOSTS)
def test_auto_settings_are_never_refused_without_a_gpu(
    host: TrainingHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipway.preflight.training.why_no_cuda_driver", lambda: "no driver")
    train = TrainParams.model_validate(CONTENT["train"])
    assert not needs_the_machine(train)
    assert place(train, host).world_size == 1
    named = train.model_copy(update={"accelerator": "gpu"})
    assert needs_the_machine(named)
    with pytest.raises(UnavailableError):
        place(named, host)


def test_machine_is_always_checked_if_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipway.preflight.training.why_no_cuda_driver", lambda: None)
    assert needs_the_machine(TrainParams.model_validate(CONTENT["train"]))


def test_make_demo_is_slipway_run_which_checks_before_dvc_removes_anything() -> None:
    recipe = (ROOT / "Makefile").read_text().partition("\ndemo: install")[2].splitlines()[1:]
    assert recipe[: recipe.index("")] == ["\t.venv/bin/slipway run"]


@pytest.mark.nightly(seconds=8)
def test_dvc_repro_with_a_mistake_keeps_the_reports(tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    project = copy_checkout(tmp_path / "copy")
    project.shell("dvc repro clean")
    page = project.path / "reports" / "clean.html"
    before = page.read_bytes()
    project.set_value("clean.blur_variance", 6.0)
    project.set_value("clean.max_bad_fraction", "a lot")
    said = project.shell("dvc repro clean", succeeds=False)
    assert "clean.max_bad_fraction: found 'a lot'" in said
    assert page.read_bytes() == before
