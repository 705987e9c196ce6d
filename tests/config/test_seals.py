"""The seal of a stage: compared inputs, refused changes, and ignored changes."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipway.config.params import read_content, resolved
from slipway.config.seals import check_inputs, sealed, sealed_params, stage_entry, stage_params
from slipway.config.stage_graph import read_pipeline
from slipway.kinds.code_digest import stage_digest, stage_files
from slipway.system.errors import SchemaError, SealError, UnavailableError, linked

PIPELINE: dict[str, Any] = {
    "clean": {
        "meta": {"params": ["data", "clean"]},
        "params": [{"code.yaml": ["clean"]}],
        "deps": ["${data.path}"],
        "outs": ["data/clean"],
    },
    "split": {
        "meta": {"params": ["seed", "data.task", "split"]},
        "params": [{"code.yaml": ["split"]}],
        "deps": ["data/clean"],
        "outs": ["data/split"],
    },
    "train": {
        "meta": {"params": ["seed", "train"]},
        "params": [{"code.yaml": ["train"]}],
        "deps": ["data/split"],
        "outs": ["artifacts/model"],
    },
    "export": {
        "params": ["export"],
        "deps": ["artifacts/model"],
        "outs": ["artifacts/bundle"],
    },
}
SECTIONS = ("version", "seed", "data", "clean", "split", "train", "export")


@pytest.fixture(name="content")
def _content(
    tmp_path: Path, params_content: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """Write the default params, a pipeline of four stages and raw data to the working folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    stages = {
        name: {**stage, "outs": [*stage["outs"], f"artifacts/seals/{name}.json"]}
        for name, stage in PIPELINE.items()
    }
    write("dvc.yaml", {"stages": stages})
    content = {name: params_content[name] for name in SECTIONS}
    content["data"]["path"] = "raw"
    write("params.yaml", content)
    Path("raw/cats").mkdir(parents=True)
    Path("raw/cats/1.png").write_text("1")
    return content


def write(name: str, content: Any) -> None:
    Path(name).write_text(yaml.dump(content, Dumper=yaml.CSafeDumper, sort_keys=False))


def run(stage: str, content: dict[str, Any], act: Callable[[], object] = lambda: None) -> None:
    with sealed(stage, resolved(content)):
        act()


def edit(content: dict[str, Any], section: str, key: str, value: Any) -> None:
    write("params.yaml", {**content, section: {**content[section], key: value}})


def test_error_names_a_param_that_changed_during_the_stage(content: dict[str, Any]) -> None:
    with pytest.raises(SealError) as refused:
        run("train", content, lambda: edit(content, "train", "label_smoothing", 0.1))
    assert str(refused.value) == (
        "params.yaml changed while train ran: train.label_smoothing 0.05 -> 0.1. "
        f"Restore the value or run again. See {linked('docs/reference/pipeline.md')}#sealed-inputs."
    )
    assert not Path("artifacts/seals/train.json").exists()


def test_param_of_another_stage_may_change_during_the_stage(content: dict[str, Any]) -> None:
    run("train", content, lambda: edit(content, "split", "folds", 5))
    seal = json.loads(Path("artifacts/seals/train.json").read_bytes())
    assert seal["params"] == {"seed": content["seed"], "train": resolved(content)["train"]}
    assert seal["code"] == stage_digest(Path(), "train")


def test_a_missing_or_broken_params_yaml_fails_the_stage(content: dict[str, Any]) -> None:
    with pytest.raises(
        SealError, match=r"params\.yaml changed while train ran: params\.yaml is not YAML"
    ):
        run("train", content, lambda: Path("params.yaml").write_text("a: ["))
    write("params.yaml", content)
    with pytest.raises(SealError, match=r"params\.yaml is missing"):
        run("train", content, Path("params.yaml").unlink)


@pytest.mark.parametrize(
    ("act", "named"),
    [
        (lambda: Path("raw/cats/1.png").write_text("22"), "raw/cats"),
        (lambda: os.utime("raw/cats/1.png"), "raw/cats"),
        (lambda: Path("raw/cats/2.png").write_text("2"), "raw/cats"),
        (lambda: Path("raw/cats/1.png").unlink(), "raw/cats"),
        (lambda: Path("raw/dogs").mkdir(), "raw/dogs"),
    ],
)
def test_error_names_the_folder_of_raw_data_that_changed_during_the_stage(
    content: dict[str, Any], act: Callable[[], object], named: str
) -> None:
    with pytest.raises(
        SealError, match=rf"raw changed while clean ran: {named}\. Restore it or run again"
    ):
        run("clean", content, act)
    run("train", content, lambda: Path("raw/3.png").write_text("3"))  # does not depend on it


def test_sealing_a_folder_with_a_link_to_itself_terminates(content: dict[str, Any]) -> None:
    Path("raw/cats/again").symlink_to("..", target_is_directory=True)
    run("clean", content)


def test_inputs_are_compared_before_work_in_progress_is_removed(content: dict[str, Any]) -> None:
    removed = []

    def work() -> None:
        edit(content, "train", "epochs", 9)
        check_inputs()
        removed.append(True)

    with pytest.raises(SealError):
        run("train", content, work)
    assert not removed
    check_inputs()  # no stage runs, so there is nothing to compare


def test_failed_stage_removes_its_seal(content: dict[str, Any]) -> None:
    run("train", content)
    with pytest.raises(ZeroDivisionError):
        run("train", content, lambda: 1 / 0)
    assert not Path("artifacts/seals/train.json").exists()


@pytest.mark.parametrize("variable", ["RANK", "SLURM_PROCID", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK"])
def test_only_the_first_process_of_a_training_writes_a_seal(
    content: dict[str, Any], variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    run("train", content, lambda: edit(content, "train", "epochs", 9))
    assert not Path("artifacts/seals").exists()
    monkeypatch.setenv(variable, "0")
    write("params.yaml", content)
    run("train", content)
    assert Path("artifacts/seals/train.json").exists()


def test_stage_refuses_a_code_yaml_made_from_different_code(content: dict[str, Any]) -> None:
    write("code.yaml", {"train": digests(content, "train") | {"code": "00" * 32}})
    with pytest.raises(
        SealError, match="the code that train runs changed after the stage `code` wrote"
    ):
        run("train", content)
    write("code.yaml", {"train": digests(content, "train")})
    run("train", content)


def test_stage_refuses_params_that_changed_after_the_stage_code(content: dict[str, Any]) -> None:
    write("code.yaml", {"train": digests(content, "train")})
    edit(content, "train", "epochs", 9)
    with pytest.raises(SealError, match=r"params\.yaml changed after the stage `code` wrote"):
        run("train", resolved(read_content()))


def digests(content: dict[str, Any], stage: str) -> dict[str, str]:
    """Return the entry of a stage in code.yaml, and so in dvc.lock."""
    params = stage_params(resolved(content), read_pipeline(content), stage)
    return stage_entry(stage_files(Path(), stage), params)


def lock(content: dict[str, Any], stage: str, code: str | None = None, **changes: Any) -> None:
    """Write a dvc.lock with an entry of `stage`."""
    digest = digests({**content, "train": {**content["train"], **changes}}, stage)
    entry = {
        "params": {"code.yaml": {stage: digest | ({"code": code} if code else {})}},
        "outs": [{"path": f"artifacts/seals/{stage}.json"}],
    }
    write("dvc.lock", {"schema": "2.0", "stages": {stage: entry}})


def test_stage_refuses_a_dvc_lock_whose_params_differ_from_the_seal(
    content: dict[str, Any],
) -> None:
    run("train", content)
    lock(content, "train")
    run("export", content)
    lock(content, "train", label_smoothing=0.1)
    with pytest.raises(
        SealError, match=r"dvc\.lock does not match train: params .* -> .*The left value is what"
    ):
        run("export", content)
    run("split", content)  # does not come after train


def test_stage_refuses_a_dvc_lock_whose_code_differs_from_the_seal(content: dict[str, Any]) -> None:
    run("train", content)
    lock(content, "train", code="00" * 32)
    with pytest.raises(
        SealError, match=r"does not match train: code .*or accepted with `dvc commit`"
    ):
        run("export", content)


def test_stage_refuses_a_dvc_lock_whose_raw_data_differs_from_the_seal(
    content: dict[str, Any],
) -> None:
    table = Path("wines.csv")
    table.write_text("a,b\r\n1,2\r\n")
    stages = {
        "clean": {
            "deps": ["wines.csv", "raw"],
            "outs": ["data/clean", "artifacts/seals/clean.json"],
        },
        "split": {"deps": ["data/clean"], "outs": ["artifacts/seals/split.json"]},
    }
    write("dvc.yaml", {"stages": stages})
    run("clean", content)
    digest = hashlib.md5(table.read_bytes(), usedforsecurity=False).hexdigest()
    outs, params = (
        [{"path": "artifacts/seals/clean.json"}],
        {"code.yaml": {"clean": digests(content, "clean")}},
    )

    def lock_data(**dep: str) -> None:
        deps = [{"path": "wines.csv", **dep}, {"path": "raw", "hash": "md5", "md5": "00.dir"}]
        write("dvc.lock", {"stages": {"clean": {"params": params, "deps": deps, "outs": outs}}})

    lock_data(hash="md5", md5=digest)
    run("split", content)
    lock_data(md5="of another kind")  # as DVC 2 wrote it
    run("split", content)
    lock_data(hash="md5", md5="00")  # edited after `clean` had compared
    with pytest.raises(
        SealError,
        match=f'dvc.lock does not match clean: wines.csv "{digest}" -> "00".*dvc repro -f -s clean',
    ):
        run("split", content)


@pytest.mark.parametrize(
    ("text", "words"),
    [("a: 2024-02-30", "2024-02-30"), ("[" * 1000, "nested too deeply")],
)
def test_unreadable_dvc_lock_is_refused(
    content: dict[str, Any],
    text: str,
    words: str,
) -> None:
    Path("dvc.lock").write_text(text)
    with pytest.raises(SchemaError, match=rf"dvc\.lock .*{words}.*Restore it with git"):
        run("export", content)


@pytest.mark.parametrize(
    ("record", "place"),
    [
        ({"stages": [1]}, "stages: "),
        ({"stages": {"train": 1}}, r"stages\.train: "),
        ({"stages": {"train": {"outs": None}}}, r"stages\.train\.outs: "),
        ({"stages": {"train": {"deps": [{"md5": "00"}]}}}, r"stages\.train\.deps\.0\.path: "),
        ({"stages": {"train": {"params": {"params.yaml": 1}}}}, r"stages\.train\.params"),
    ],
)
def test_damaged_dvc_lock_is_refused(content: dict[str, Any], record: Any, place: str) -> None:
    write("dvc.lock", record)
    with pytest.raises(SchemaError, match=rf"dvc\.lock is damaged at {place}.*Restore it with git"):
        run("export", content)


@pytest.mark.parametrize("path", ["${data.path}", "${ data.path }", "${data[path]}"])
def test_paths_in_dvc_yaml_that_contain_params_are_resolved_as_by_dvc(
    content: dict[str, Any], path: str
) -> None:
    write("dvc.yaml", {"stages": {"clean": {"deps": [path, "\\${data.path}"]}}})
    with pytest.raises(SealError, match="raw changed while clean ran"):
        run("clean", content, lambda: Path("raw/cats/2.png").write_text("2"))
    with pytest.raises(SealError, match=r"\$\{data\.path\} changed while clean ran"):
        run("clean", content, lambda: Path("${data.path}").write_text("2"))


@pytest.mark.parametrize(
    "dep",
    ["artifacts/model/model.json", "artifacts", "./artifacts/model/"],
)
def test_stage_depends_on_a_stage_whose_output_overlaps_its_dependency(
    content: dict[str, Any],
    dep: str,
) -> None:
    train = {"outs": ["artifacts/model", "artifacts/seals/train.json"]}
    export = {"deps": [dep], "outs": ["artifacts/bundle"]}
    write("dvc.yaml", {"stages": {"train": train, "export": export}})
    lock(content, "train")
    with pytest.raises(SealError, match=r"artifacts/seals/train\.json is missing"):
        run("export", content)


@pytest.mark.parametrize("variable", ["RANK", "LOCAL_RANK"])
def test_a_rank_variable_that_is_not_a_number_is_refused(
    content: dict[str, Any],
    variable: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(variable, "gold")
    with pytest.raises(UnavailableError, match=f"{variable} is 'gold'.*unset {variable}"):
        run("train", content)
    monkeypatch.setenv(variable, "-1")  # no process group
    run("train", content)
    assert Path("artifacts/seals/train.json").exists()


@pytest.fixture(name="lock_raw")
def _lock_raw(content: dict[str, Any]) -> Callable[..., None]:
    """Return a function that runs clean on `raw`, and writes a dvc.lock with the given counts."""
    Path(".dvc").mkdir()  # DVC reads no .dvcignore above this folder
    Path("raw/cats/2.png").symlink_to("1.png")
    Path("raw/.DS_Store").write_text("333")
    Path("raw/empty").mkdir()
    run("clean", content)

    def lock_counts(**counts: int) -> None:
        params = {"code.yaml": {"clean": digests(content, "clean")}}
        dep = {"path": "raw", "hash": "md5", "md5": "00.dir", **counts}
        outs = [{"path": "artifacts/seals/clean.json"}]
        write("dvc.lock", {"stages": {"clean": {"params": params, "deps": [dep], "outs": outs}}})

    return lock_counts


def test_stage_refuses_a_dvc_lock_with_other_counts_of_raw_files_than_the_seal(
    content: dict[str, Any],
    lock_raw: Callable[..., None],
) -> None:
    lock_raw(nfiles=3, size=5)  # like DVC: links and hidden files count, empty folders do not
    run("split", content)
    lock_raw(nfiles=4, size=6)  # one was added after `clean` had compared
    with pytest.raises(SealError, match=r"clean: raw\.nfiles 3 -> 4; raw\.size 5 -> 6\."):
        run("split", content)
    lock_raw(nfiles=3, size=6)
    with pytest.raises(SealError, match=r"clean: raw\.size 5 -> 6\."):
        run("split", content)
    lock_raw()  # a record without counts
    run("split", content)


@pytest.mark.parametrize(
    ("patterns", "compared"),
    [
        ("", True),
        ("# cats\n/tmp\n/.venv/\n__pycache__\n*.tmp\nother/cats\n", True),
        (".DS_Store", False),
        ("*.png", False),
        ("!cats/", False),
        ("raw/cats", False),
        ("/r*", False),
        ("**/cats", False),
        ("raw", False),
        ("[c]ats", False),
    ],
)
def test_raw_folder_with_files_that_dvc_may_ignore_is_not_compared(
    content: dict[str, Any], lock_raw: Callable[..., None], patterns: str, compared: bool
) -> None:
    Path(".dvcignore").write_text(patterns)
    run("clean", content)
    lock_raw(nfiles=1, size=1)
    if compared:
        with pytest.raises(SealError, match=r"raw\.nfiles 3 -> 1"):
            run("split", content)
    else:
        run("split", content)


@pytest.mark.parametrize("name", [".git", ".dvc", ".hg", ".dvcignore"])
def test_raw_folder_that_contains_a_git_repository_is_not_compared(
    content: dict[str, Any],
    lock_raw: Callable[..., None],
    name: str,
) -> None:
    Path("raw/cats", name).mkdir()
    run("clean", content)
    lock_raw(nfiles=1, size=1)
    run("split", content)


def test_dvc_lock_entry_without_a_seal_is_refused(content: dict[str, Any]) -> None:
    lock(content, "train")
    with pytest.raises(SealError, match=r"artifacts/seals/train\.json is missing.*dvc repro train"):
        run("export", content)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format_version": 1}'])
def test_an_unreadable_seal_is_refused(content: dict[str, Any], text: str) -> None:
    lock(content, "train")
    Path("artifacts/seals").mkdir(parents=True)
    Path("artifacts/seals/train.json").write_text(text)
    with pytest.raises(SealError, match=r"train\.json is (not readable|not of version)"):
        run("export", content)


def model(content: dict[str, Any], **changes: Any) -> None:
    from slipway.config.training import TrainParams

    params = TrainParams.model_validate(content["train"]).model_dump(mode="json")
    Path("artifacts/model").mkdir(parents=True, exist_ok=True)
    Path("artifacts/model/model.json").write_text(
        json.dumps({"seed": content["seed"], "params": {**params, **changes}})
    )


def test_model_json_whose_params_differ_from_the_seal_of_train_is_refused(
    content: dict[str, Any],
) -> None:
    run("train", content)
    model(content)
    edit(content, "train", "epochs", 9)  # for the next run: not what the model is compared with
    run("export", resolved(read_content()))
    model(content, epochs=9)
    with pytest.raises(
        SealError, match=r"model\.json is not the model of .*train\.json: train\.epochs 9 -> 30"
    ):
        run("export", resolved(read_content()))


def test_lineage_contains_the_params_that_each_stage_ran_with(content: dict[str, Any]) -> None:
    for stage in ("clean", "split", "train"):
        run(stage, content)
    later = {
        **content,
        "train": {**content["train"], "epochs": 9},
        "split": {**content["split"], "folds": 5},
    }
    write("params.yaml", later)
    found: list[dict[str, Any]] = []
    run("export", later, lambda: found.append(sealed_params(later)))
    sections = ("seed", "data", "clean", "split", "train", "export")
    ran_with = resolved(content)
    assert found == [{section: ran_with[section] for section in sections}]
    assert sealed_params(later) is later  # no stage runs


@pytest.mark.parametrize("key", ["seed", "task"])
def test_lineage_of_stages_with_different_params_is_refused(
    content: dict[str, Any], key: str
) -> None:
    other = (
        {**content, "seed": 8}
        if key == "seed"
        else {**content, "data": {**content["data"], "task": "image_multilabel"}}
    )
    run("clean", content)
    write("params.yaml", other)
    run("split", other)
    write("params.yaml", content)
    run("train", content)
    with pytest.raises(SealError, match=r"ran with different params: (seed|data\.task) "):
        run("export", content, lambda: sealed_params(content))


def test_a_stage_is_refused_if_the_seal_of_an_earlier_stage_is_missing(
    content: dict[str, Any],
) -> None:
    run("train", content)
    with pytest.raises(SealError, match=r"artifacts/seals/clean\.json is missing"):
        run("export", content, lambda: sealed_params(content))


def test_all_params_are_sealed_if_dvc_yaml_is_missing(content: dict[str, Any]) -> None:
    Path("dvc.yaml").unlink()
    with pytest.raises(SealError, match=r"split\.folds null -> 5"):
        run("train", content, lambda: edit(content, "split", "folds", 5))


def test_stage_code_and_commands_that_are_no_stage_write_no_seal(content: dict[str, Any]) -> None:
    run("code", content, lambda: edit(content, "train", "epochs", 9))
    with sealed(None, content):
        check_inputs()
    assert not Path("artifacts/seals").exists()
