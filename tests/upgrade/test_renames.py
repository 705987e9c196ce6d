"""slipway/upgrade/renames.yaml lists existing names, and no old name is still in use."""

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from ruamel.yaml import YAML

from slipway.cli.verbs import VERBS
from slipway.config.params import Params
from slipway.serving.settings import EXTENSION_VARIABLES, PREFIX, Settings
from tests.monitoring.queries import alerts, documented_metrics
from tests.structure.syntax import nodes
from tests.structure.tracked import tracked_files

ROOT = Path(__file__).resolve().parents[2]
SERVING = ROOT / "docs/reference/serving.md"
RENAMES: dict[str, Any] = YAML(typ="safe").load(ROOT / "slipway/upgrade/renames.yaml")
STAGES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
# The modules that define the records of each file or answer whose fields were renamed.
WRITERS = {
    "artifacts/bundle/bundle.json": (
        "slipway/artifacts/bundle.py",
        "slipway/artifacts/uncertainty.py",
        "slipway/inputs/images.py",
    ),
    "reports/leaderboard.json": (
        "slipway/artifacts/leaderboard.py",
        "slipway/artifacts/bundle.py",
    ),
    "artifacts/pruned/model.json": ("slipway/training/pruning/result.py",),
    "reports/prune.json": ("slipway/training/pruning/run.py",),
    "reports/split.json": ("slipway/data/splits/report.py",),
    "reports/label_issues.json": ("slipway/reports/evaluation/label_issues.py",),
    "reports/profile.json": ("slipway/profiling/report.py",),
    "artifacts/model/model.json": (
        "slipway/training/networks/networks.py",
        "slipway/inputs/images.py",
    ),
    "data/packed/manifest.json": ("slipway/data/store/packed.py", "slipway/inputs/images.py"),
    "artifacts/rebuilt_engine/target_certificate.json": ("slipway/runtimes/rebuild.py",),
    "artifacts/bundle/drift.json": (
        "slipway/drift/image_features.py",
        "slipway/drift/reference.py",
    ),
    "artifacts/certificate.json": ("slipway/artifacts/certificate.py",),
    "artifacts/capacity.json": ("slipway/serving/load_test/card.py",),
    "metrics/evaluate.json": (
        "slipway/reports/evaluation/record.py",
        "slipway/reports/evaluation/uncertainty.py",
    ),
    "artifacts/calibration.json": ("slipway/artifacts/uncertainty.py",),
    "POST /feedback": (
        "slipway/serving/monitoring/feedback.py",
        "slipway/serving/monitoring/extension.py",
    ),
    "GET /rollout": ("slipway/serving/rollout/reports.py",),
    "GET /model": (
        "slipway/predictor/model.py",
        "slipway/artifacts/uncertainty.py",
        "slipway/serving/engine_rebuild/extension.py",
    ),
    "POST /explain": ("slipway/predictor/model.py",),
    "POST /predict": ("slipway/predictor/model.py",),
    "POST /v2/models/slipway/infer": ("slipway/serving/open_inference/conversion.py",),
}
TELEMETRY = "slipway/training/telemetry/telemetry.py"  # the metrics `step/...` of a training
# Old names may stay in the table itself, in history and in results as they were measured.
HISTORY = (
    *("slipway/upgrade/renames.yaml", "slipway/upgrade/pipeline_0.yaml", "CHANGELOG.md"),
    *("bench/LOG.md", "bench/results/", "tests/upgrade/", "docs/how-to/upgrade.md"),
    "docs/decisions/",
)


def params_fields(model: type[BaseModel] = Params, section: str = "") -> dict[str, FieldInfo]:
    """The typed fields of params.yaml and of its sections, by dotted key."""
    found = {}
    for name, field in model.model_fields.items():
        found[section + name] = field
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= params_fields(field.annotation, f"{section}{name}.")
    return found


FIELDS = params_fields()


def faults(renames: dict[str, str], present: Iterable[str]) -> list[str]:
    """The new names that are not present, and the old ones that still are."""
    names = set(present)
    missing = [f"{new} does not exist" for new in renames.values() if new not in names]
    return missing + [f"{old} still exists" for old in renames if old in names]


def value_faults(key: str, values: dict[Any, Any]) -> Iterator[str]:
    """The new values that params.yaml refuses at `key`, and the old ones that it accepts."""
    fields = [
        field
        for name, field in FIELDS.items()
        if name == key or (key.endswith(".*") and name.startswith(key[:-1]))
    ]
    if not fields:
        yield f"{key} does not exist"
    for field in fields:
        for old, new in values.items():
            if not accepts(field, new):
                yield f"{key} refuses {new!r}"
            if isinstance(old, str) and "/" in old:
                continue  # a path; the text of the repository is searched for it
            if accepts(field, old):
                yield f"{key} still accepts {old!r}"


def accepts(field: FieldInfo, value: object) -> bool:
    annotation: Any = Annotated[field.annotation, field]
    is_section = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    strict = None if is_section else ConfigDict(strict=True)  # a section has it in its own
    typed = TypeAdapter[Any](annotation, config=strict)
    try:
        typed.validate_python(value)
    except ValidationError:
        return False
    return True


@cache
def names_in_code(module: str) -> frozenset[str]:
    """The string constants of a module and the names of its annotated fields."""
    found = set()
    for node in nodes((ROOT / module).read_text()):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return frozenset(found)


def names_written_by(file: str) -> frozenset[str]:
    return frozenset().union(*map(names_in_code, WRITERS[file]))


def written(paths: Iterable[str]) -> set[str]:
    """The paths that are outputs of a stage, or that the code names: in full, or in an output."""
    outputs = {
        str(*output) if isinstance(output, dict) else output
        for stage in STAGES.values()
        for output in stage.get("outs", [])
    }
    code = [p for p in tracked_files(ROOT) if p.startswith("slipway/")]
    named = outputs.union(*map(names_in_code, code))
    return {
        path
        for path in paths
        if path in named or (str(Path(path).parent) in outputs and Path(path).name in named)
    }


def runnable(commands: Iterable[str]) -> set[str]:
    """The verbs of `slipway`, the targets of the Makefile, and modules for `python -m`."""
    return {command for command in commands if _can_run(command)}


def _can_run(command: str) -> bool:
    program, *words = command.split()
    if program == "slipway":
        if words[0] not in VERBS:
            return False
        verb = VERBS[words[0]]
        inner = words[1] if words[1:] and not words[1].startswith("-") else None
        return isinstance(verb.target, str) or (inner in verb.target if inner else bool(verb.alone))
    if program == "make":
        return f"\n{words[0]}:" in (ROOT / "Makefile").read_text()
    _, module, *options = words
    path = module.replace(".", "/")
    for file in (f"{path}/__main__.py", f"{path}.py"):
        if (ROOT / file).is_file():
            return {"__main__", *options} <= names_in_code(file)
    return False


def mentions(names: Iterable[str]) -> list[str]:
    """The files that still name one of the old names, and the name."""
    patterns = {name: re.compile(rf"(?<![\w.]){re.escape(name)}(?!\w|\.\w|-\w)") for name in names}
    endings = (".py", ".md", ".yaml", ".yml", ".toml", ".sh", ".js", ".html", "Makefile")
    return [
        f"{path}: {found}"
        for path in tracked_files(ROOT, endings)
        if not path.startswith(HISTORY)
        for text in [(ROOT / path).read_text()]
        for found in sorted(patterns)
        if found in text and patterns[found].search(text)
    ]


def both(renames: dict[str, str]) -> list[str]:
    return [*renames, *renames.values()]


def test_renames_lead_from_a_file_without_a_version_to_the_version_of_params_yaml() -> None:
    assert (RENAMES["from"], RENAMES["to"]) == (0, 1)
    assert accepts(FIELDS["version"], RENAMES["to"])


def test_every_surface_has_a_comment_that_names_its_readers() -> None:
    text = (ROOT / "slipway/upgrade/renames.yaml").read_text()
    commented = re.findall(r"^# (\w+): for ", text, flags=re.MULTILINE)
    assert commented == [surface for surface in RENAMES if surface not in ("from", "to")]


def test_every_renamed_key_of_params_exists_by_its_new_name_only() -> None:
    assert faults(RENAMES["params"], FIELDS) == []


def test_params_accept_every_new_value_and_refuse_the_old_one() -> None:
    found = [
        fault
        for key, values in RENAMES["params_value"].items()
        for fault in value_faults(key, values)
    ]
    assert found == []


def test_params_accept_every_added_value() -> None:
    added = {
        key: value
        for key, value in RENAMES["params_added"].items()
        if not key.startswith("train.network_arguments.")  # of one network
    }
    assert [key for key in added if key not in FIELDS] == []
    assert [key for key, value in added.items() if not accepts(FIELDS[key], value)] == []


def test_the_modules_of_stages_run_by_their_new_names() -> None:
    commands = [stage["cmd"] for stage in STAGES.values()]
    for new in RENAMES["pipeline"].values():
        assert all(command.startswith(new) for command in commands)


def test_every_renamed_artifact_is_written_by_its_new_name_only() -> None:
    assert faults(RENAMES["artifact"], written(both(RENAMES["artifact"]))) == []


@pytest.mark.parametrize("file", [*RENAMES["file_format"], *RENAMES["endpoint"]])
def test_every_renamed_field_is_written_by_its_new_name_only(file: str) -> None:
    fields = (RENAMES["file_format"] | RENAMES["endpoint"])[file]
    assert faults(fields, names_written_by(file)) == []


def test_every_renamed_metric_is_recorded_by_its_new_name_only() -> None:
    endings = {
        re.sub("^([a-z]+/|[a-z]+)", "", old): re.sub("^([a-z]+/|[a-z]+)", "", new)
        for old, new in RENAMES["metric"].items()
    }
    present = names_written_by("metrics/evaluate.json") | names_in_code(TELEMETRY)
    assert faults(endings, present) == []


def test_every_renamed_command_runs_by_its_new_name_only() -> None:
    assert faults(RENAMES["command"], runnable(both(RENAMES["command"]))) == []


def test_every_renamed_variable_metric_and_alert_of_the_service_has_its_new_name_only() -> None:
    variables = [
        f"{PREFIX}{name.upper()}" for name in (*Settings.model_fields, *EXTENSION_VARIABLES)
    ]
    assert faults(RENAMES["env"], variables) == []
    assert faults(RENAMES["service_metric"], documented_metrics()) == []
    assert faults(RENAMES["alert"], alerts()) == []
    for metric, outcomes in RENAMES["service_metric_label"].items():
        row = re.search(rf"^\| `{metric}` .*$", SERVING.read_text(), flags=re.MULTILINE)
        assert row
        assert faults(outcomes, re.findall(r"`(\w+)`", row[0])) == []


def test_no_old_name_is_used_in_code_or_docs() -> None:
    surfaces = ("params", "artifact", "metric", "command", "env", "service_metric", "alert")
    old = [name for surface in surfaces for name in RENAMES[surface]]
    assert mentions(old) == []


def test_an_entry_with_a_wrong_new_name_is_found() -> None:
    assert faults({"clean.max_bad": "clean.max_bad_ratio"}, FIELDS) == [
        "clean.max_bad_ratio does not exist"
    ]
    paths = {
        "artifacts/weights": "artifacts/network",
        "artifacts/bundle/no_such_rows.npz": "artifacts/bundle/no_such_file.npz",
    }
    assert faults(paths, written(both(paths))) == [
        "artifacts/network does not exist",
        "artifacts/bundle/no_such_file.npz does not exist",
    ]
    commands = {
        "make model": "make network",
        "python -m slipway.x": "python -m slipway.config.params",
        "python -m slipway.data.merge --x": "python -m slipway.data.merge --no-such-option",
    }
    assert faults(commands, runnable(both(commands))) == [
        f"{new} does not exist" for new in commands.values()
    ]


def test_an_entry_whose_old_name_is_still_in_use_is_found() -> None:
    assert faults({"train.epochs": "train.batch_size"}, FIELDS) == ["train.epochs still exists"]
    paths = {"artifacts/bundle": "artifacts/model"}
    assert faults(paths, written(both(paths))) == ["artifacts/bundle still exists"]
    commands = {
        "make ladder": "slipway profile",
        "python -m slipway.stages.train": "python -m slipway.replay",
    }
    assert faults(commands, runnable(both(commands))) == [
        "make ladder still exists",
        "python -m slipway.stages.train still exists",
    ]
    assert "Makefile: python -m bench.ladder" in mentions(["python -m bench.ladder"])
    assert "dvc.yaml: artifacts/bundle" in mentions(["artifacts/bundle"])


def test_an_entry_with_a_wrong_value_is_found() -> None:
    assert list(value_faults("train.optimizer", {"adamw": "adam"})) == [
        "train.optimizer refuses 'adam'",
        "train.optimizer still accepts 'adamw'",
    ]
    assert list(value_faults("train.no_such_key", {0: None})) == [
        "train.no_such_key does not exist"
    ]
    assert len(list(value_faults("clean.rules.*", {"flag": None}))) == len(
        [key for key in FIELDS if key.startswith("clean.rules.")]
    )
