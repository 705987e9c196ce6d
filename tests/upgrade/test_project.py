"""`slipway upgrade`: what it shows, writes and refuses in a project folder."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from slipway.config.params import load_params
from slipway.config.pipeline import RECORD, is_unedited, pipeline_text
from slipway.system import files
from slipway.system.errors import ParamsError, SchemaError
from slipway.upgrade.project import Rerun, reruns, upgrade
from slipway.upgrade.renames import renamed_text, table

pytestmark = pytest.mark.unit
FORMER = Path(__file__).parent
PARAMS_0 = FORMER / "version_0/params.yaml"
PIPELINE_0 = FORMER.parents[1] / "slipway/upgrade/pipeline_0.yaml"
# As Slipway wrote it before the page of the data: `augment` has no reports/data.html, and `split`
# does not read data.task.
PIPELINE_1 = (FORMER / "version_1/dvc.yaml").read_text()
SPLIT_COLUMNS = "data.split_column, data.time_column"
OWN = Path(__file__).resolve().parents[2] / "params.yaml"


@pytest.fixture
def former(tmp_path: Path) -> Path:
    """A project of version 0."""
    copy_version_0(tmp_path)
    return tmp_path


def copy_version_0(folder: Path) -> None:
    shutil.copy(PARAMS_0, folder)
    shutil.copy(PIPELINE_0, folder / "dvc.yaml")


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


def test_an_invalid_file_leaves_the_project_unchanged(former: Path) -> None:
    path = former / "params.yaml"
    path.write_text(path.read_text().replace("  fit: ", "  fitting: "))
    before = texts(former)
    with pytest.raises(ParamsError, match="fitting: unknown key"):
        upgrade(former, apply=True)
    assert texts(former) == before


@pytest.mark.parametrize("name", ["params.yaml", "dvc.yaml"])
def test_error_names_a_folder_without_a_project(former: Path, name: str) -> None:
    (former / name).unlink()
    with pytest.raises(ParamsError, match=f"{name} is missing"):
        upgrade(former, apply=True)


def test_a_pipeline_that_is_not_yaml_is_refused(former: Path) -> None:
    (former / "dvc.yaml").write_text("stages: [")
    with pytest.raises(SchemaError, match=r"dvc\.yaml is not YAML"):
        upgrade(former, apply=True)
    assert (former / "params.yaml").read_text() == PARAMS_0.read_text()


def test_the_pipeline_of_a_clone_is_left_to_git(former: Path) -> None:
    (former / "slipway/stages").mkdir(parents=True)
    result = upgrade(former, apply=True)
    assert result.pipeline_note == "comes with the code, by git"
    assert (former / "dvc.yaml").read_text() == PIPELINE_0.read_text()


def test_an_edit_of_the_written_pipeline_is_noticed() -> None:
    text = pipeline_text()
    assert is_unedited(text)
    assert is_unedited(PIPELINE_1)
    assert not is_unedited(text.replace("data/clean", "data/cleaned", 1))
    assert not is_unedited(PIPELINE_0.read_text())


def test_an_edited_pipeline_of_version_0_keeps_its_edits_under_new_names(former: Path) -> None:
    path = former / "dvc.yaml"
    own = "  own: # ours\n    cmd: python plot.py\n    deps: [artifacts/checkpoint/model.json]\n"
    own += "    params: [clean.max_bad_share, prune.share]\n\n  clean:"
    path.write_text(path.read_text().replace("  clean:", own, 1))
    result = upgrade(former, apply=True)
    text = path.read_text()
    assert "  own: # ours\n" in text
    stages = parsed(text)["stages"]
    assert stages.pop("own") == {
        "cmd": "python plot.py",
        "deps": ["artifacts/model/model.json"],
        "params": ["clean.max_bad_fraction", "prune.sparsity"],
    }
    assert content(text) == content(pipeline_text(), without="own")
    assert result.conflicts == []


def test_a_pipeline_older_than_the_known_one_gets_all_of_this_version(former: Path) -> None:
    path = former / "dvc.yaml"
    before, rest = path.read_text().split("  audit:\n")
    text = f"{before}  train:\n{rest.split('  train:', 1)[1].lstrip(chr(10))}"
    path.write_text(text.replace("      - stages/clean.py\n", "      - slipway/former.py\n", 1))
    result = upgrade(former, apply=True)
    text = path.read_text()
    assert content(text) == content(pipeline_text())
    assert text.index("\n  code:\n") < text.index("\n\n  clean:\n")
    assert "- code.yaml: {cache: false}" in text
    assert result.conflicts == []
    assert "is not recorded" in result.pipeline_note


def test_a_stage_with_foreach_is_left_unchanged_and_reported(edited: Path) -> None:
    path = edited / "dvc.yaml"
    loop = "  augment:\n    foreach: [a, b]\n    do:\n      cmd: python mine.py ${item}\n\n  audit:"
    path.write_text(re.sub(r"(?s)  augment:.*?  audit:", loop, path.read_text()))
    (conflict,) = upgrade(edited, apply=True).conflicts
    assert conflict.startswith("stages.augment: your file has `{foreach: [a, b], do: ")
    assert loop in path.read_text()


def content(text: str, without: str = "own") -> dict[str, Any]:
    """The content of a dvc.yaml, with the entries of each list in order."""
    found = parsed(text)
    found["stages"].pop(without, None)
    for entry in found["stages"].values():
        for group in ("params", "deps", "outs", "metrics"):
            entry[group] = sorted(entry.get(group, []), key=str)
    return found


@pytest.fixture
def edited(project: Path) -> Path:
    """A project whose dvc.yaml of a former version was edited, with the record of what it was."""
    text = PIPELINE_1
    for old, new in (
        ("  split:\n", "  # my picture of the data\n  own:\n    cmd: python plot.py\n\n  split:\n"),
        (
            "      - reports/augment.png\n",
            "      - reports/augment.png # for talks\n      - a.txt\n",
        ),
        ("      - reports/columns.yaml\n", ""),
    ):
        assert old in text
        text = text.replace(old, new, 1)
    (project / "dvc.yaml").write_text(text)
    files.write_text(project / RECORD, PIPELINE_1)
    return project


def test_an_edited_pipeline_is_merged_with_what_changed_since_it_was_written(edited: Path) -> None:
    shown = upgrade(edited, apply=True)
    text = (edited / "dvc.yaml").read_text()
    assert "      - reports/augment.png # for talks\n      - reports/data.html\n" in text
    assert "  # my picture of the data\n  own:\n    cmd: python plot.py\n\n  split:\n" in text
    assert "reports/columns.yaml" not in text  # as the user wanted
    stages, expected = parsed(text)["stages"], parsed(pipeline_text())["stages"]
    assert stages["augment"]["outs"][-1] == "a.txt"
    assert stages["evaluate"] == expected["evaluate"]
    assert shown.conflicts == []
    assert shown.pipeline_note == "was edited; the changes of this version are merged into it"
    changed = [line for line in shown.patch.splitlines() if line[:1] in "+-"]
    assert changed == [
        "--- a/dvc.yaml",
        "+++ b/dvc.yaml",
        *(f"-{line}" for line in PIPELINE_1.splitlines()[1:2]),
        *(f"+{line}" for line in pipeline_text().splitlines()[1:2]),
        f"-    params: [seed, {SPLIT_COLUMNS}, split, code.yaml: [split]]",
        f"+    params: [seed, data.task, {SPLIT_COLUMNS}, split, {{code.yaml: [split]}}]",
        "+      - reports/data.html",
        "-    params: [seed, train, code.yaml: [train]]",
        "+    params: [seed, train, ensemble, {code.yaml: [train]}]",
        "+      - evaluate.decision",
    ]


def test_a_merged_pipeline_is_not_merged_again(edited: Path) -> None:
    upgrade(edited, apply=True)
    again = upgrade(edited, apply=True)
    assert again.patch == ""
    assert again.pipeline_note == "was edited; it has all of this version"


def test_without_a_record_the_merge_removes_nothing_and_says_so(edited: Path) -> None:
    (edited / RECORD).unlink()
    shown = upgrade(edited, apply=True)
    outs = parsed((edited / "dvc.yaml").read_text())["stages"]["clean"]["outs"]
    assert "reports/columns.yaml" in outs
    assert "is not recorded: lines that you had removed are back" in shown.pipeline_note
    assert (edited / RECORD).read_text() == pipeline_text()


def test_an_edited_pipeline_of_this_version_is_left_unchanged(project: Path) -> None:
    own = pipeline_text().replace("      - reports/columns.yaml\n", "")
    (project / "dvc.yaml").write_text(own)
    assert upgrade(project, apply=True).patch == ""


def test_a_damaged_record_is_not_merged_with(edited: Path) -> None:
    with (edited / RECORD).open("a") as record:
        record.write("  more: {}\n")
    assert "is not recorded" in upgrade(edited, apply=False).pipeline_note


def test_a_conflict_is_reported_and_the_users_change_stays(edited: Path) -> None:
    ours = "python -m slipway.stages.train"
    path = edited / "dvc.yaml"
    body = PIPELINE_1.split("\n", 2)[2].replace(ours, "python -m former.train")
    head = pipeline_text().splitlines()[0]
    head += f"\n# SHA-256 of the other lines: {files.sha256_bytes(body.encode())}\n"
    files.write_text(edited / RECORD, head + body)
    path.write_text(head + path.read_text().split("\n", 2)[2].replace(ours, "nice train"))
    assert upgrade(edited, apply=True).conflicts == [
        f"stages.train.cmd: your file has `nice train`, this version has `{ours}` in place of "
        "`python -m former.train`; expected one of them. Yours stays: change it by hand unless "
        "you mean it"
    ]
    assert parsed(path.read_text())["stages"]["train"]["cmd"] == "nice train"


def test_a_layout_with_anchors_is_refused_and_nothing_is_written(edited: Path) -> None:
    path = edited / "dvc.yaml"
    augment, others = path.read_text().split("      - data/augmented\n", 1)
    augment = augment.removesuffix("    outs:\n      - artifacts/seals/augment.json\n")
    outs = "    outs: &all\n      - artifacts/seals/augment.json\n      - data/augmented\n"
    path.write_text(
        augment + outs + others.replace("  train:\n", "  train:\n    wdir: .\n    own: *all\n")
    )
    before = texts(edited)
    with pytest.raises(SchemaError, match="cannot be merged automatically in this layout"):
        upgrade(edited, apply=True)
    assert texts(edited) == before


def test_windows_line_breaks_stay_in_a_merged_pipeline(edited: Path) -> None:
    path = edited / "dvc.yaml"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    upgrade(edited, apply=True)
    text = path.read_bytes()
    assert b"reports/data.html" in text
    assert text.count(b"\n") == text.count(b"\r\n")


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
    (former / "board.json").write_text('{"expr": "slipway_candidate_share > 0"}\n')
    (former / "plot.py").write_text('tag = "step/data_wait_share"\n')
    (former / "artifacts/released").mkdir(parents=True)
    (former / "artifacts/run.sh").write_text("SLIPWAY_HOSTS=a\n")  # written by stages
    result = upgrade(former, apply=True)
    assert result.mentions == [
        "board.json:1: slipway_candidate_share is now slipway_candidate_fraction",
        "plot.py:1: step/data_wait_share is now step/data_wait_fraction",
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
    with pytest.raises(SchemaError, match=r"dvc\.lock is not YAML.* not whole\. Restore it"):
        upgrade(project, apply=True)
