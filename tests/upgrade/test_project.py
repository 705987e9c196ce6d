"""`slipway upgrade`: what it shows, writes and refuses in a project folder."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from slipway.config.params import load_params
from slipway.config.pipeline import is_unedited, missing_parts, pipeline_text
from slipway.system import files
from slipway.system.errors import ParamsError, SchemaError
from slipway.upgrade.project import upgrade
from slipway.upgrade.renames import renamed_text, table
from slipway.upgrade.reruns import Rerun, reruns

pytestmark = pytest.mark.unit
VERSION_0 = Path(__file__).parent / "version_0"
OWN = Path(__file__).resolve().parents[2] / "params.yaml"


@pytest.fixture
def former(tmp_path: Path) -> Path:
    """A project of version 0."""
    for name in ("params.yaml", "dvc.yaml"):
        shutil.copy(VERSION_0 / name, tmp_path)
    return tmp_path


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of this version."""
    shutil.copy(OWN, tmp_path)
    (tmp_path / "dvc.yaml").write_text(pipeline_text())
    return tmp_path


def texts(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def parsed(text: str) -> dict[str, Any]:
    content: dict[str, Any] = YAML(typ="safe", pure=True).load(text)
    return content


def test_nothing_is_written_before_it_is_confirmed(former: Path) -> None:
    before = texts(former)
    shown = upgrade(former, apply=False).text()
    assert texts(former) == before
    assert "-  max_bad_share: 0.05" in shown
    assert "+  max_bad_fraction: 0.05" in shown
    assert "from version 0 to 1: keys renamed: 11, values" in shown


def test_a_confirmed_upgrade_is_whole_and_a_second_one_changes_nothing(former: Path) -> None:
    upgrade(former, apply=True)
    assert load_params(former / "params.yaml").version == table().to
    assert (former / "dvc.yaml").read_text() == pipeline_text()
    before = texts(former)
    again = upgrade(former, apply=True)
    assert again.patch == ""
    assert texts(former) == before
    assert not list(former.glob("*.partial"))


def test_a_file_that_is_not_understood_leaves_the_project_as_it_is(former: Path) -> None:
    path = former / "params.yaml"
    path.write_text(path.read_text().replace("  fit: ", "  fitting: "))
    before = texts(former)
    with pytest.raises(ParamsError, match="fitting: unknown key"):
        upgrade(former, apply=True)
    assert texts(former) == before


@pytest.mark.parametrize("name", ["params.yaml", "dvc.yaml"])
def test_a_folder_without_a_project_is_named(former: Path, name: str) -> None:
    (former / name).unlink()
    with pytest.raises(ParamsError, match=f"{name} is missing"):
        upgrade(former, apply=True)


def test_a_pipeline_that_is_no_yaml_is_refused(former: Path) -> None:
    (former / "dvc.yaml").write_text("stages: [")
    with pytest.raises(SchemaError, match=r"dvc\.yaml is not YAML"):
        upgrade(former, apply=True)
    assert (former / "params.yaml").read_text() == (VERSION_0 / "params.yaml").read_text()


def test_the_pipeline_of_a_clone_is_left_to_git(former: Path) -> None:
    (former / "slipway/stages").mkdir(parents=True)
    result = upgrade(former, apply=True)
    assert result.pipeline_note == "comes with the code, by git"
    assert (former / "dvc.yaml").read_text() == (VERSION_0 / "dvc.yaml").read_text()


def test_an_edit_of_the_written_pipeline_is_noticed() -> None:
    text = pipeline_text()
    assert is_unedited(text, [])
    assert is_unedited(text.replace("\n", "\r\n"), [])
    assert not is_unedited(text.replace("data/clean", "data/cleaned", 1), [])
    assert not is_unedited((VERSION_0 / "dvc.yaml").read_text(), [])
    assert is_unedited((VERSION_0 / "dvc.yaml").read_text(), table().pipeline_sha256)


def test_an_edited_pipeline_keeps_its_edits_under_new_names(former: Path) -> None:
    path = former / "dvc.yaml"
    own = "  own:\n    cmd: python plot.py\n    deps: [artifacts/checkpoint/model.json]\n"
    own += "    params: [clean.max_bad_share, prune.share]\n\n  clean:"
    path.write_text(path.read_text().replace("  clean:", own, 1))
    result = upgrade(former, apply=True)
    stages = parsed(path.read_text())["stages"]
    assert stages["own"] == {
        "cmd": "python plot.py",
        "deps": ["artifacts/model/model.json"],
        "params": ["clean.max_bad_fraction", "prune.sparsity"],
    }
    assert stages["train"]["cmd"] == "python -m slipway.stages.train"
    assert "code: the stage is missing" in result.unmoved
    assert any(line.startswith("train: params lacks code.yaml") for line in result.unmoved)
    assert any(line.startswith("train: deps names code") for line in result.unmoved)


def test_a_complete_edited_pipeline_has_nothing_left_to_change() -> None:
    text = pipeline_text().replace(
        "      - data/clean\n", "      - data/clean\n      - mine.csv\n", 1
    )
    assert missing_parts(text) == []


@pytest.mark.parametrize(
    ("old", "new"), [*table().params.items(), *table().artifact.items(), *table().pipeline.items()]
)
def test_each_former_name_is_replaced_in_an_edited_pipeline(old: str, new: str) -> None:
    assert renamed_text(f"  - {old}\n", table()) == f"  - {new}\n"


@pytest.mark.parametrize("text", ["my.data.digests", "artifacts/checkpoints", "prune.share_x"])
def test_names_that_only_contain_a_former_name_stay(text: str) -> None:
    assert renamed_text(f"  - {text}\n", table()) == f"  - {text}\n"


def test_former_names_in_other_files_and_leftovers_are_reported(former: Path) -> None:
    (former / "serving.env").write_text("SLIPWAY_HOSTS=a.example\nSLIPWAY_KEYS=/run/keys\n")
    (former / "run.sh").write_text("python -m slipway.collect --kept rows\n")
    (former / "artifacts/released").mkdir(parents=True)
    (former / "artifacts/run.sh").write_text("SLIPWAY_HOSTS=a\n")  # written by stages
    result = upgrade(former, apply=True)
    assert result.mentions == [
        "run.sh:1: python -m slipway.collect --kept is now "
        "python -m slipway.traffic.collect --request-log",
        "serving.env:1: SLIPWAY_HOSTS is now SLIPWAY_ALLOWED_HOSTS",
    ]
    (left,) = result.leftovers
    assert left.startswith("artifacts/released: artifacts/reference_model takes its place")
    assert (former / "serving.env").read_text().startswith("SLIPWAY_HOSTS")


PIPELINE = {
    "stages": {
        "clean": {
            "cmd": "python -m clean",
            "params": ["data", "clean.limit"],
            "deps": ["${data.path}"],
            "outs": ["data/clean"],
        },
        "train": {"cmd": "python -m train", "params": ["train"], "deps": ["data/clean"]},
    }
}
CONTENT = {"data": {"path": "x.csv"}, "clean": {"limit": 1}, "train": {"epochs": 3}}
LOCK: dict[str, Any] = {
    "schema": "2.0",
    "stages": {
        "clean": {
            "cmd": "python -m clean",
            "params": {"params.yaml": {"data": {"path": "x.csv"}, "clean.limit": 1}},
            "deps": [{"path": "x.csv"}],
            "outs": [{"path": "data/clean"}],
        },
        "train": {
            "cmd": "python -m train",
            "params": {"params.yaml": {"train": {"epochs": 3}}},
            "deps": [{"path": "data/clean"}],
        },
    },
}


def locked(folder: Path, **changes: Any) -> list[Rerun]:
    """The reruns after a run whose entry of `clean` in dvc.lock differed by `changes`."""
    clean = {**LOCK["stages"]["clean"], **changes}
    lock = {"schema": "2.0", "stages": {**LOCK["stages"], "clean": clean}}
    files.write_json(folder / "dvc.lock", lock)
    return reruns(folder, PIPELINE, CONTENT, {"clean.max": "clean.limit"})


def test_no_stage_runs_again_if_nothing_differs(tmp_path: Path) -> None:
    assert locked(tmp_path) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cmd": "python -m stages.clean"}, "its command is now `python -m clean`"),
        (
            {"params": {"params.yaml": {"data": {"path": "x.csv"}, "clean.limit": 2}}},
            "params changed: clean.limit",
        ),
        (
            {"params": {"params.yaml": {"data": {"path": "x.csv"}, "clean.max": 1}}},
            "params renamed: clean.limit",
        ),
        ({"deps": [{"path": "y.csv"}]}, "dependencies changed: x.csv, y.csv"),
        ({"outs": [{"path": "data/old"}]}, "outputs changed: data/clean, data/old"),
    ],
)
def test_a_stage_runs_again_for_each_reason_and_those_after_it_may(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    clean, train = locked(tmp_path, **changes)
    assert clean == Rerun("clean", [reason])
    assert train == Rerun("train", ["if clean writes other results"])


def test_a_stage_runs_again_if_its_code_has_another_digest(tmp_path: Path) -> None:
    params = {"params.yaml": LOCK["stages"]["clean"]["params"]["params.yaml"]}
    found = locked(tmp_path, params=params | {"code.yaml": {"clean": "0" * 64}})
    assert found[0].reasons == ["its code changed"]


def test_every_stage_runs_without_a_lock_file(project: Path) -> None:
    shown = upgrade(project, apply=False).text()
    assert "clean, split, precompute, augment, audit, train" in shown
    assert "never run" in shown


def test_a_damaged_lock_file_is_refused(project: Path) -> None:
    (project / "dvc.lock").write_text("stages: [")
    with pytest.raises(SchemaError, match=r"Restore .*dvc\.lock with git"):
        upgrade(project, apply=True)
