"""`slipway run`, `compare`, `take` and `reset` in a tiny project, as processes that users start."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slipway.config.stage_graph import Pipeline
from slipway.experiments.records import new_name, read_records, write_record
from slipway.experiments.reproduction import is_running
from slipway.experiments.run import ExperimentRequest, alone, conclude
from slipway.experiments.workspace import opened_before, take, working_in
from slipway.system.errors import LockedError, ParamsError, SchemaError
from slipway.system.files import write_text
from tests.experiments.records import record
from tests.experiments.tiny_project import TinyProject, make_project

STAGES = Pipeline({}, {}, {"train": [], "evaluate": []}, {})


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory without a git repository above it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    return tmp_path


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> TinyProject:
    return make_project(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["trian"], "did you mean 'train'"),
        (["zzz"], "the stages are: train, evaluate"),
        (["train", "evaluate"], "at most one"),
    ],
)
def test_unknown_and_several_stages_are_refused(words: list[str], part: str) -> None:
    with pytest.raises(ParamsError, match=part):
        ExperimentRequest(words).stage(STAGES)


def test_run_accepts_a_stage_and_assignments_in_any_order() -> None:
    request = ExperimentRequest(["train.epochs=5", "train", "seed=1"])
    assert request.stage(STAGES) == "train"
    assert request.assignments == ["train.epochs=5", "seed=1"]


@pytest.mark.parametrize("is_quiet", [False, True])
def test_a_run_ends_with_what_to_do_now(
    empty: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_quiet: bool
) -> None:
    for name, value in (
        ("read_pipeline", lambda: Pipeline({}, {}, {"verify": []}, {})),
        ("commit_hint", lambda record: "git add"),
        ("summary.main", lambda root: print("what now")),
    ):
        monkeypatch.setattr(f"slipway.experiments.run.{name}", value)
    conclude(record("run-1"), is_quiet=is_quiet)
    printed = [line for line in capsys.readouterr().out.splitlines() if line]
    assert printed[1:] == ["git add"] * (not is_quiet) + ["what now"]


@pytest.mark.usefixtures("empty")
def test_an_experiment_without_a_name_gets_the_next_number() -> None:
    assert new_name(None) == "run-1"
    write_record(record("run-7"))
    write_record(record("other"))
    assert new_name(None) == "run-8"


@pytest.mark.usefixtures("empty")
def test_error_for_a_taken_or_invalid_name_proposes_another() -> None:
    write_record(record("wide"))
    with pytest.raises(ParamsError, match="'wide-2'"):
        new_name("wide")
    for name in ("a b", "../x", "-x", "a..b", ""):
        with pytest.raises(ParamsError, match="such as wide-network"):
            new_name(name)


@pytest.mark.usefixtures("empty")
@pytest.mark.parametrize("status", ["interrupted", "failed", "running"])
def test_an_unfinished_run_gives_its_name_to_the_run_that_resumes_it(status: str) -> None:
    write_record(record("first", status=status, process=2**22 + 1))
    assert new_name("first") == "first"


@pytest.mark.usefixtures("empty")
def test_the_name_of_an_unfinished_trial_stays_taken() -> None:
    write_record(record("search-1-001", status="failed", search="search-1"))
    with pytest.raises(ParamsError, match=r"rm \.work/experiments/search-1-001\.\*$"):
        new_name("search-1-001")


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["dvc", "repro", "train"], "`dvc repro train`"),
        (["bentoml", "serve"], "`bentoml serve`"),
        (["slipway", "show"], ""),
        (["editor", "dvc"], ""),
    ],
)
def test_reset_refuses_while_a_program_works_in_the_project(
    tmp_path: Path, words: list[str], shown: str
) -> None:
    program, below = tmp_path / words[0], tmp_path / "project/notebooks"
    program.write_text("import time\nprint(flush=True)\ntime.sleep(60)\n")
    below.mkdir(parents=True)
    command = [sys.executable, str(program), *words[1:]]
    with subprocess.Popen(command, cwd=below, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found, elsewhere = working_in(tmp_path / "project"), working_in(tmp_path / "other")
        process.kill()
    assert [f"`{command}`" for command in found.values()] == [shown] * bool(shown)
    assert elsewhere == {}


@pytest.mark.usefixtures("empty")
def test_error_names_the_path_of_a_damaged_record() -> None:
    Path(".work/experiments").mkdir(parents=True)
    Path(".work/experiments/old.json").write_text("{}")
    with pytest.raises(SchemaError, match=r"old\.json.*Remove the file"):
        read_records()


@pytest.mark.usefixtures("empty")
def test_error_names_the_running_dvc_of_a_killed_run_and_how_to_end_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_record(record("run-1", status="running", process=2**22 + 1, group=123))
    monkeypatch.setattr("slipway.experiments.run.is_running", lambda group: group == 123)
    with pytest.raises(LockedError, match="kill -- -123"), alone():
        pass


def test_a_detached_head_returns_to_its_branch_without_changing_files(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "tiny")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "tiny@example.com")

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q", "-b", "main")
    (empty / "mine.txt").write_text("1")
    git("add", "mine.txt")
    git("commit", "-q", "-m", "Start")
    start = git("rev-parse", "HEAD")
    write_text(empty / ".work/experiments/head", "refs/heads/main")
    git("checkout", "-q", "--detach")
    (empty / "mine.txt").write_text("2")
    git("commit", "-q", "-a", "-m", "Half an experiment")
    with alone():
        assert git("symbolic-ref", "HEAD") == "refs/heads/main"
    assert git("rev-parse", "HEAD") == start
    assert (empty / "mine.txt").read_text() == "2"
    assert not (empty / ".work/experiments/head").exists()


def test_opened_before_lists_trials_whose_test_rows_were_opened(empty: Path) -> None:
    params = {"seed": 7, "train.epochs": 30}
    trials = [
        record(
            f"search-1-{number:03d}",
            stage="train",
            search="search-1",
            results=None,
            params=params | {"train.learning_rate": number},
        )
        for number in range(3)
    ]
    other = record("search-2-000", stage="train", search="search-2", results=None, params=params)
    taken = record("run-1", params=trials[1].params)
    failed = record("run-2", params=trials[2].params, status="failed", results=None)
    for one in (*trials, other, taken, failed):
        write_record(one)
    assert opened_before(trials[0]) == ["search-1-001"]
    assert opened_before(trials[1]) == [], "the same one may be taken again"
    assert opened_before(other) == []


def test_a_take_outside_a_project_says_so_and_leaves_nothing(empty: Path) -> None:
    with pytest.raises(ParamsError, match=r"params\.yaml is missing"):
        take("run-1", accept_loss=False)
    assert list(empty.iterdir()) == []


@pytest.mark.process
def test_a_run_keeps_its_assignments_and_a_record_even_if_it_fails(
    project: TinyProject,
) -> None:
    text = project.slipway("run", "train.learning_rate=0.1", "--name", "good")
    assert "git add params.yaml dvc.lock metrics && git commit -m good" in text
    project.slipway("run", "train.learning_rate=0.2", "--name", "better")
    text = project.slipway("run", "train.learning_rate=2", code=1)
    assert "run-1 failed" in text
    assert "learning_rate: 2\n" in (project.path / "params.yaml").read_text()
    rows = project.rows()
    assert list(rows) == ["run-1", "better", "good"]
    assert rows["run-1"]["cause"].startswith("the loss is not finite")
    assert rows["run-1"]["results"] is None
    assert rows["run-1"]["ended_at"] == "train"
    assert rows["good"]["results"]["metric"]["value"] == pytest.approx(0.9)
    assert rows["good"]["params"] == {"train.learning_rate": 0.1}

    project.slipway("run", "train.lerning_rate=1", code=1)
    project.slipway("run", "--name", "good", code=1)
    assert list(project.rows()) == ["run-1", "better", "good"], "refused runs leave no row"

    # The failed run's value is in no commit and in no experiment: it is an edit.
    assert "params.yaml would lose edits" in project.slipway("take", "good", code=1)
    assert "cannot be taken" in project.slipway("take", "run-1", code=1)
    project.slipway("take", "good", "--yes")
    assert (project.path / "artifacts/model").read_text() == "0.1"
    project.slipway("take", "better")
    assert (project.path / "artifacts/model").read_text() == "0.2"
    assert '"value": 0.8' in (project.path / "metrics/evaluate.json").read_text()
    assert project.git("branch", "--show-current") == "main"

    # The rows of finished experiments do not need the records.
    for path in (project.path / ".work/experiments").glob("*.json"):
        path.unlink()
    rows = project.rows()
    assert set(rows) == {"better", "good"}
    assert rows["better"]["results"]["metric"]["value"] == pytest.approx(0.8)

    edited = (project.path / "params.yaml").read_text() + "# mine\n"
    (project.path / "params.yaml").write_text(edited)
    history = project.path / ".work/serving/history.jsonl"  # of a service that ran here
    history.parent.mkdir(parents=True, exist_ok=True)
    history.write_text("{}\n")
    assert "Add --yes" in project.slipway("reset", code=1)
    project.slipway("reset", "--yes")
    assert history.exists()
    assert not (project.path / "artifacts/model").exists()
    assert not (project.path / "metrics/evaluate.json").exists()
    assert (project.path / "data/demo/digits.parquet").exists()
    assert (project.path / "params.yaml").read_text() == edited


@pytest.mark.nightly(seconds=45)
def test_killed_and_interrupted_runs_resume_and_a_second_run_is_refused(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    (tmp_path / "wait").touch()
    process = project.start("run")
    project.wait_for("started")
    assert "already running" in project.slipway("run", code=1)
    process.kill()
    process.communicate()
    _wait_until_dvc_is_gone(tmp_path / ".work/experiments/run-1.json")
    assert project.rows()["run-1"]["status"] == "interrupted"

    process = project.start("run")
    project.wait_for("started")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert project.rows()["run-2"]["status"] == "interrupted"

    process = project.start("run")
    project.wait_for("started")
    params = tmp_path / "params.yaml"
    params.write_text(params.read_text().replace("epochs: 30", "epochs: 31"))
    (tmp_path / "wait").unlink()
    output, _ = process.communicate(timeout=120)
    assert "train.epochs" in output
    assert "edited while it ran" in project.rows()["run-3"]["cause"]

    project.slipway("run")
    assert project.rows()["run-4"]["status"] == "done"


def _wait_until_dvc_is_gone(record_file: Path) -> None:
    """DVC ends with its stage, which ends once it prints to nobody."""
    deadline = time.monotonic() + 60
    while is_running(json.loads(record_file.read_text())["group"]):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.nightly(seconds=25)
def test_a_take_that_fails_or_is_killed_leaves_the_workspace_as_it_was(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    project.slipway("run", "train.learning_rate=0.1", "--name", "good")
    project.slipway("run", "train.learning_rate=0.2", "--name", "better")
    before = _state(project)

    cached = _cached(tmp_path, "0.1")
    cached.rename(tmp_path / ".work/kept")
    text = project.slipway("take", "good", code=1)
    assert "`dvc exp apply` failed" in text
    assert "the workspace is as it was before" in text
    assert _state(project) == before
    (tmp_path / ".work/kept").rename(cached)

    process = project.start("take", "good")
    _wait_for(tmp_path / ".work/experiments/before_take/take.json")
    process.kill()
    process.communicate()
    (tmp_path / "artifacts/model").unlink()  # as DVC does before it puts the other one there
    (tmp_path / "params.yaml").write_text("half")
    assert "`slipway take good` was not finished" in project.slipway("reset", "--yes")
    assert (tmp_path / "params.yaml").read_text() == before["params.yaml"]
    project.slipway("take", "good")
    assert (tmp_path / "artifacts/model").read_text() == "0.1"
    assert not (tmp_path / ".work/experiments/before_take").exists()

    for text in ("0.1", "0.2"):
        _cached(tmp_path, text).unlink()
    (tmp_path / "artifacts/model").unlink()
    text = project.slipway("take", "better", code=1)
    assert "without outputs that DVC no longer has; `slipway run` makes them again" in text
    assert not (tmp_path / ".work/experiments/before_take").exists()


def _state(project: TinyProject) -> dict[str, str]:
    """The files that an experiment changes, and git's view of them."""
    names = ("params.yaml", "dvc.lock", "metrics/evaluate.json", "artifacts/model")
    texts = {name: (project.path / name).read_text() for name in names}
    return texts | {"git": project.git("status", "--porcelain")}


def _cached(folder: Path, text: str) -> Path:
    (found,) = (
        path
        for path in (folder / ".dvc/cache/files").rglob("*")
        if path.is_file() and path.read_text() == text
    )
    return found


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.nightly(seconds=10)
def test_quiet_keeps_the_output_of_the_stages_in_the_log(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    text = project.slipway("--quiet", "run", "train.learning_rate=0.1")
    assert "training with" not in text
    assert "run-1: done" in text
    assert "git add" not in text
    assert "training with 0.1" in (tmp_path / ".work/experiments/run-1.log").read_text()
    assert "the loss is not finite" in project.slipway("-q", "run", "train.learning_rate=2", code=1)


@pytest.mark.nightly(seconds=12)
def test_a_run_killed_while_dvc_saved_it_says_so(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    process = project.start("run")
    record_file = tmp_path / ".work/experiments/run-1.json"
    _wait_for(record_file)
    while json.loads(record_file.read_text())["status"] != "done":
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert project.rows()["run-1"]["cause"].startswith("killed before DVC saved it")
    assert "repeats it in seconds" in project.slipway("take", "run-1", code=1)
    project.slipway("run")
    project.slipway("take", "run-2")
