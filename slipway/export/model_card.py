"""Writes `MODEL_CARD.md` of a bundle: purpose, data, training, quality and weaknesses.

The sections follow Mitchell et al., Model Cards for Model Reporting (2019). Every figure comes from
a file that a stage wrote; only the purpose is in the user's own words (`export.purpose`). The card
states what was not measured.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway.artifacts.bundle import Choice, Lineage, Metric, ModelFile, Provider
from slipway.artifacts.uncertainty import Calibration
from slipway.inputs.columns import ColumnContract
from slipway.inputs.contract import InputContract
from slipway.inputs.images import ImageContract
from slipway.kinds.registry import kind_of
from slipway.kinds.targets import TargetKind
from slipway.reports.console import baseline_cells, interval, number, size
from slipway.reports.evaluation.text import temperature_text
from slipway.system.errors import SchemaError
from slipway.system.user_code import UserCode
from slipway.training.networks.networks import ENSEMBLE, ModelManifest

_FEW_ROWS = 30  # test rows of a class below which its figures say little
_MOST_CLASSES = 20
_NO_PURPOSE = (
    "Nobody has written down yet what this model is for and what it must not be used for: "
    "`export.purpose` in params.yaml."
)


@dataclass(frozen=True)
class CardFacts:
    """The facts from which a model card is written."""

    training: ModelManifest
    calibration: Calibration
    metrics: Mapping[str, Metric]
    baseline: Mapping[str, float]
    lineage: Lineage
    clean: Mapping[str, Any]  # reports/clean.json
    split: Mapping[str, Any]  # reports/split.json
    evaluation: Mapping[str, Any]  # metrics/evaluate.json

    @property
    def target(self) -> TargetKind:
        """The kind of the network's target."""
        return kind_of(self.training.network.task).target

    @property
    def target_column(self) -> str:
        """The name of the target column."""
        return str(self.lineage.params["data"]["target_column"])


def read_report(path: Path) -> dict[str, Any]:
    """Read the JSON report of a stage. Raises SchemaError if it is missing or malformed."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise SchemaError(f"{path} is missing. Run `slipway run`.") from None
    except ValueError as error:
        raise SchemaError(f"{path} is not JSON: {error}. Run `dvc repro --force`.") from error
    if not isinstance(content, dict):
        raise SchemaError(
            f"{path} holds {type(content).__name__}, expected one object. Run `dvc repro --force`."
        )
    return content


def model_card(
    facts: CardFacts, models: Mapping[str, ModelFile], choice: Mapping[Provider, Choice]
) -> str:
    """Return the model card as Markdown.

    `models` are keyed by variant, `choice` by provider.
    """
    network = facts.training.network
    what = f"one of {len(network.classes)} classes" if network.classes else facts.target_column
    if facts.target.several:
        what = f"any of {len(network.classes)} labels"
    purpose = facts.lineage.params["export"]["purpose"] or _NO_PURPOSE
    sections = (
        ("Meant for", str(purpose).strip()),
        ("What goes in and what comes out", _contract(facts)),
        ("Data", _bullets(_data(facts))),
        ("Training", _bullets(_training(facts))),
        ("Quality", _quality(facts)),
        ("Uncertainty", _bullets(_uncertainty(facts))),
        ("Weaknesses", _bullets(_weaknesses(facts))),
        ("Files", _files(models, choice)),
        ("Origin", _bullets(_origin(facts))),
    )
    parts = [f"# {_words(network.task).capitalize()}: {what}", _in_short(facts)]
    parts += [f"## {name}\n\n{text}" for name, text in sections]
    return "\n\n".join(parts) + "\n"


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"* {line}" for line in lines)


def _in_short(facts: CardFacts) -> str:
    name, training = facts.target.headline, facts.training
    metric, train_rows = facts.metrics[name], facts.split["splits"]["train"]["rows"]
    return (
        f"On {metric.rows:,} rows that it never saw, {_words(name)} is "
        f"**{number(metric.value)}** ({metric.confidence * 100:g} % interval {interval(metric)}). "
        f"`{training.network.name}`, {training.num_parameters:,} parameters, "
        f"trained on {train_rows:,} rows."
    )


def _contract(facts: CardFacts) -> str:
    classes = facts.training.network.classes
    takes = _input(facts.training.network.input)
    if not classes:
        return f"{takes}\n\nThe answer is a number, in the unit of `{facts.target_column}`."
    shown = ", ".join(f"`{name}`" for name in classes[:_MOST_CLASSES])
    if len(classes) > _MOST_CLASSES:
        shown += f" and {len(classes) - _MOST_CLASSES} more"
    return f"{takes}\n\nThe answer is a probability for each of: {shown}."


def _input(contract: InputContract) -> str:
    if isinstance(contract, ColumnContract):
        columns = [
            f"`{column.name}` ({column.kind}{', required' if column.required else ''})"
            for column in contract.columns
        ]
        return f"One row with the columns {', '.join(columns)}."
    if isinstance(contract, ImageContract):
        height, width, _ = contract.shape
        return (
            "One picture in any common format. It is turned upright, brought to "
            f"{width} x {height} px ({contract.resize_mode}) and to "
            f"{'grey' if contract.channels == 1 else 'RGB'}."
        )
    return f"One row of {contract.kind}."


def _data(facts: CardFacts) -> Iterator[str]:
    clean, splits = facts.clean, facts.split["splits"]
    refused, flagged = _counts(clean["refused"]), _counts(clean["flagged"])
    yield (
        f"`{facts.lineage.params['data']['path']}`: {clean['read']:,} rows read, "
        f"{clean['kept']:,} kept, {clean['read'] - clean['kept']:,} refused"
        f"{f' ({refused})' if refused else ''}."
    )
    if flagged:
        yield f"Kept but flagged: {flagged}."
    rows = ", ".join(f"{name} {splits[name]['rows']:,}" for name in ("train", "val", "test"))
    yield f"Split: {rows}."
    yield (
        "Rows of the test split that have a duplicate, or their group, in another split: "
        f"{facts.split['leaks']['rows']:,}."
    )


def _counts(found: Mapping[str, Any]) -> str:
    counts = [(rule, entry["count"]) for rule, entry in sorted(found.items())]
    return ", ".join(f"{count:,} {_words(rule)}" for rule, count in counts if count)


def _training(facts: CardFacts) -> list[str]:
    training, train = facts.training, facts.training.params
    ended = "stopped early" if training.stopped_early else "to the end"
    actual, num_segments = training.actual, len(training.segments)
    processes = "process" if actual.world_size == 1 else "processes"
    if actual.model_parallel:
        processes += f", {actual.model_parallel} for each copy of the network,"
    resumed = f"; resumed with other processes or threads, {num_segments} segments in all"
    if training.network.name == ENSEMBLE:
        return list(_members(training))
    weights = f"{ended}; the weights are those of epoch {training.kept_epoch}"
    ensemble = facts.lineage.params.get("ensemble", {})
    if ensemble.get("method") == "soup":
        weights = "in all; the weights are the mean of several trainings' (a model soup)"
    elif student := ensemble.get("student"):
        weights += (
            f". It is the student of an ensemble ({ensemble['method']}), whose answers to the "
            f"training rows are {student['soft_fraction']:g} of its loss"
        )
    return [
        f"{training.epochs} epochs, {weights}. Seed {training.seed}.",
        f"{train['optimizer']}, learning rate {train['learning_rate']:g} ({train['schedule']}), "
        f"batches of {train['batch_size']}.",
        f"Ran as {actual.strategy}, {actual.precision}, {actual.world_size} {processes} "
        f"on {actual.accelerator}{resumed if num_segments > 1 else ''}.",
    ]


def _members(training: ModelManifest) -> Iterator[str]:
    arguments = training.network.arguments
    members = zip(arguments["members"], arguments["weights"], strict=True)
    yield (
        f"{len(arguments['members'])} models answer together ({arguments['method']}); they were "
        f"trained for {training.epochs} epochs or rounds in all. Seed {training.seed}."
    )
    yield from (f"Member {member['label']}, weight {number(weight)}." for member, weight in members)


def _quality(facts: CardFacts) -> str:
    lines = [
        "| Metric | Value | Interval | Rows | Baseline | Difference |",
        "|---|---|---|---|---|---|",
    ]
    for name, metric in facts.metrics.items():
        cells = [_words(name), number(metric.value), interval(metric), f"{metric.rows:,}"]
        lines.append(f"| {' | '.join(cells + baseline_cells(metric, facts.baseline.get(name)))} |")
    note = (
        "The intervals say how much a number would change with other test rows, not with another "
        f"training. Baseline: {facts.target.baseline_rule}."
    )
    return "\n\n".join(["\n".join(lines), note, *_by_class(facts)])


def _by_class(facts: CardFacts) -> Iterator[str]:
    classes: Sequence[Mapping[str, Any]] = facts.evaluation.get("per_class", [])
    if not classes:
        return
    worst = sorted(classes, key=lambda entry: entry["f1"])[:_MOST_CLASSES]
    lines = ["| Class | Rows | Precision | Recall | F1 |", "|---|---|---|---|---|"]
    for entry in worst:
        scores = [number(entry[name]) for name in ("precision", "recall", "f1")]
        cells = [entry["class"], f"{entry['rows']:,}", *scores]
        lines.append(f"| {' | '.join(cells)} |")
    weakest = f"The {len(worst)} weakest of {len(classes)} classes"
    shown = weakest if len(worst) < len(classes) else "Every class, the weakest first"
    yield f"{shown}:\n\n" + "\n".join(lines)


def _uncertainty(facts: CardFacts) -> Iterator[str]:
    conformal, ood = facts.calibration.conformal, facts.calibration.ood
    measured = {
        entry["name"]: Metric(**{key: value for key, value in entry.items() if key != "name"})
        for entry in facts.evaluation.get("calibration", [])
    }
    if before := measured.get("calibration_error_before"):
        yield (
            "Probabilities are calibrated inside the graph "
            f"({temperature_text(facts.calibration)}): the expected calibration "
            f"error on the test split is {number(measured['calibration_error'].value)}, "
            f"without it {number(before.value)}."
        )
    if conformal.is_vacuous:
        yield (
            f"Its sets and intervals exclude nothing: {conformal.rows:,} validation rows are too "
            f"few for {conformal.coverage:.0%}."
        )
    else:
        kind = "a set of labels" if facts.target.has_classes else "an interval"
        yield (
            f"Each answer has {kind} made to contain the true value for {conformal.coverage:.0%} "
            f"of rows like the validation rows (conformal prediction, {conformal.rows:,} rows). "
            f"{_on_test('It does', measured.get('coverage'))}"
        )
    if ood.threshold is None:
        yield f"The OOD score has no threshold: {ood.rows:,} validation rows are too few for one."
    else:
        yield (
            f"Each answer has an OOD score. At most {ood.fraction:.1%} of ordinary rows should be "
            f"above its threshold. {_on_test('They are', measured.get('ood_fraction'))}"
        )


def _on_test(what: str, fraction: Metric | None) -> str:
    if fraction is None:
        return "On the test split this was not measured."
    return (
        f"{what} for {fraction.value:.1%} of the test split "
        f"({fraction.low:.1%} to {fraction.high:.1%}, n = {fraction.rows:,})."
    )


def _weaknesses(facts: CardFacts) -> Iterator[str]:
    for entry in facts.evaluation.get("slices", []):
        if entry["is_worse"]:
            bounds = f"{number(entry['low'])} to {number(entry['high'])}, n = {entry['rows']:,}"
            found = f"{_words(entry['metric'])} {number(entry['measured'])} ({bounds})"
            yield f"Worse than the rest if {entry['by']} is {entry['value']}: {found}."
    classes: Sequence[Mapping[str, Any]] = facts.evaluation.get("per_class", [])
    few = [f"{entry['class']} ({entry['rows']})" for entry in classes if entry["rows"] < _FEW_ROWS]
    if few:
        yield f"Fewer than {_FEW_ROWS} test rows, too few to say much: {', '.join(few)}."
    if leaked := facts.evaluation.get("leaked_rows"):
        yield (
            f"{leaked} test rows leak from another split; "
            "the figures without them are in metrics/evaluate.json."
        )
    for copy in facts.split.get("target_copies", []):
        yield f"Suspected leak, {copy['finding']}."
    unchecked = [
        _words(rule)
        for rule, reason in sorted(facts.clean["not_checked"].items())
        if reason.startswith("clean.rules.")
    ]
    if unchecked:
        yield f"Rules of cleaning that were switched off: {', '.join(unchecked)}."
    if facts.target.has_classes and not facts.target.several:
        yield "It always names one of its classes, for any input: see the OOD score."
    yield (
        "Its figures hold for data like the test split. Other sources, devices, places and times "
        "were not measured."
    )


def _files(models: Mapping[str, ModelFile], choice: Mapping[Provider, Choice]) -> str:
    lines = ["| Variant | File | Size | Precision | Meant for |", "|---|---|---|---|---|"]
    for variant, model in models.items():
        meant_for = ", ".join(model.meant_for) or "nothing"
        cells = [variant, f"`{model.file}`", size(model.bytes), model.precision, meant_for]
        lines.append(f"| {' | '.join(cells)} |")
    chosen = [
        f"On {provider} the service's `auto` takes `{found.variant}`. {found.reason}"
        for provider, found in choice.items()
    ]
    certificate = (
        "`certificate.json` has the difference of each variant from the trained network on each "
        "provider, and names this bundle by digest. The service is not ready without it, and shows "
        "it at `GET /model`."
    )
    return "\n\n".join(["\n".join(lines), *chosen, certificate])


def _origin(facts: CardFacts) -> list[str]:
    revision = facts.lineage.git_revision or "none (outside a git work tree)"
    dirty = " with changes that were not committed" if facts.lineage.git_dirty else ""
    versions = [f"{name} {version}" for name, version in sorted(facts.training.versions.items())]
    return [
        f"Git revision `{revision}`{dirty}.",
        f"Weights SHA-256 `{facts.training.weights_sha256}`.",
        f"Trained with {', '.join(versions)}.",
        *_licenses(facts),
        *_user_code(facts),
        "`bundle.json` has every parameter and the digest of every input.",
    ]


def _licenses(facts: CardFacts) -> Iterator[str]:
    for of, key in (("the weights", "license"), ("the raw data", "data_license")):
        declared = facts.lineage.params["export"][key]
        yield f"Licence of {of}: {declared or f'not declared (`export.{key}`)'}."


def _user_code(facts: CardFacts) -> Iterator[str]:
    """Yield a line for each part of the model that is the user's own code, with its digest."""
    evaluation = map(UserCode.model_validate, facts.evaluation.get("user_code", []))
    for code in (*facts.training.user_code, *evaluation):
        yield f"User code: `{code.key}` is `{code.name}`, SHA-256 `{code.sha256}`."


def _words(name: str) -> str:
    return name.replace("_", " ")
