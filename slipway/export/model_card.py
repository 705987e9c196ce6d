"""`MODEL_CARD.md` of a bundle: what the model is for, what it learnt from, how good it is, and where it is weak.

The sections follow Mitchell et al., Model Cards for Model Reporting (2019). Every figure comes from a file that a stage wrote; only the
purpose is the user's own words (`export.purpose`). Where something was not measured the card says so.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway.artifacts.bundle import Choice, Lineage, Metric, ModelFile, Provider
from slipway.artifacts.uncertainty import Calibration
from slipway.inputs.columns import ColumnContract
from slipway.inputs.images import ImageContract
from slipway.kinds.registry import is_classification
from slipway.reports.console import baseline_cells, interval, number, size
from slipway.reports.evaluation.record import baseline_words, headlines
from slipway.system.errors import SchemaError
from slipway.training.networks.networks import ModelManifest

_FEW_ROWS = 30  # of a class in the test split, below which its figures say little
_MOST_CLASSES = 20
_NOT_WRITTEN = "Nobody has written down yet what this model is for and what it must not be used for: `export.purpose` in params.yaml."


@dataclass(frozen=True)
class CardFacts:
    """What a card is made from."""

    training: ModelManifest
    calibration: Calibration
    metrics: Mapping[str, Metric]
    baseline: Mapping[str, float]
    lineage: Lineage
    clean: Mapping[str, Any]  # reports/clean.json
    split: Mapping[str, Any]  # reports/split.json
    evaluation: Mapping[str, Any]  # metrics/evaluate.json


def read_report(path: Path) -> dict[str, Any]:
    """A stage's JSON report; SchemaError if it is missing or none."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise SchemaError(f"{path} is missing. Run `dvc repro`.") from None
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
    """The whole card as Markdown, of a bundle with these `models` by variant and this `choice` by provider."""
    sections = (
        ("Meant for", _purpose(facts)),
        ("What goes in and what comes out", _contract(facts)),
        ("Data", _data(facts)),
        ("Training", _training(facts)),
        ("How good it is", _quality(facts)),
        ("How sure it is", _certainty(facts)),
        ("Where it is weak", _weak(facts)),
        ("Files", _files(models, choice)),
        ("Where it comes from", _origin(facts)),
    )
    title = f"# {_task(facts).capitalize()}: {_what(facts)}"
    return (
        "\n\n".join([title, _in_short(facts), *(f"## {name}\n\n{text}" for name, text in sections)])
        + "\n"
    )


def _task(facts: CardFacts) -> str:
    return facts.training.network.task.replace("_", " ")


def _what(facts: CardFacts) -> str:
    classes = facts.training.network.classes
    return (
        f"one of {len(classes)} classes"
        if classes
        else str(facts.lineage.params["data"]["target_column"])
    )


def _in_short(facts: CardFacts) -> str:
    name = headlines(facts.training.network.task)[0]
    metric = facts.metrics[name]
    return (
        f"On {metric.rows:,} rows that it never saw, {_words(name)} is **{number(metric.value)}** "
        f"({metric.confidence * 100:g} % interval {interval(metric)}). `{facts.training.network.name}`, "
        f"{facts.training.num_parameters:,} parameters, trained on {facts.split['splits']['train']['rows']:,} rows."
    )


def _purpose(facts: CardFacts) -> str:
    return str(facts.lineage.params["export"]["purpose"] or _NOT_WRITTEN).strip()


def _contract(facts: CardFacts) -> str:
    network = facts.training.network
    if isinstance(network.input, ColumnContract):
        kinds = [
            f"`{column.name}` ({column.kind}{', required' if column.required else ''})"
            for column in network.input.columns
        ]
        takes = f"One row with the columns {', '.join(kinds)}."
    elif isinstance(network.input, ImageContract):
        contract = network.input
        colour = "grey" if contract.channels == 1 else "RGB"
        height, width, _ = contract.shape
        takes = f"One picture in any common format; it is turned upright, brought to {width} x {height} px ({contract.resize_mode}) and to {colour}."
    else:
        takes = f"One row of {network.input.kind}."
    if network.classes:
        shown = ", ".join(f"`{name}`" for name in network.classes[:_MOST_CLASSES])
        more = (
            f" and {len(network.classes) - _MOST_CLASSES} more"
            if len(network.classes) > _MOST_CLASSES
            else ""
        )
        return f"{takes}\n\nThe answer is a probability for each of: {shown}{more}."
    return f"{takes}\n\nThe answer is a number, in the unit of `{facts.lineage.params['data']['target_column']}`."


def _data(facts: CardFacts) -> str:
    clean, splits = facts.clean, facts.split["splits"]
    refused, flagged = _counts(clean["refused"]), _counts(clean["flagged"])
    lost = f"{clean['read'] - clean['kept']:,} refused" + (f" ({refused})" if refused else "")
    rows = ", ".join(f"{name} {splits[name]['rows']:,}" for name in ("train", "val", "test"))
    lines = [
        f"`{facts.lineage.params['data']['path']}`: {clean['read']:,} rows read, {clean['kept']:,} kept, {lost}.",
        f"Kept but flagged: {flagged}." if flagged else "",
        f"Split: {rows}.",
        f"Rows of the test split that have a twin, or their group, in another split: {facts.split['leaks']['rows']:,}.",
    ]
    return "\n".join(f"* {line}" for line in lines if line)


def _counts(found: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{entry['count']:,} {_words(rule)}"
        for rule, entry in sorted(found.items())
        if entry["count"]
    )


def _training(facts: CardFacts) -> str:
    card, train = facts.training, facts.lineage.params["train"]
    ended = "stopped early" if card.stopped_early else "to the end"
    actual = card.actual
    return "\n".join(
        [
            f"* {card.epochs} epochs, {ended}; the weights are those of epoch {card.kept_epoch}. Seed {card.seed}.",
            f"* {train['optimizer']}, learning rate {train['learning_rate']:g} ({train['schedule']}), batches of {train['batch_size']}.",
            f"* Ran as {actual.strategy}, {actual.precision}, {actual.world_size} {_plural(actual.world_size, 'process', 'processes')} "
            f"on {actual.accelerator}"
            + (
                ""
                if len(card.segments) == 1
                else f"; resumed with other processes or threads, {len(card.segments)} segments in all"
            )
            + ".",
        ]
    )


def _quality(facts: CardFacts) -> str:
    lines = [
        "| Metric | Value | Interval | Rows | Baseline | Difference |",
        "|---|---|---|---|---|---|",
    ]
    for name, metric in facts.metrics.items():
        cells = [_words(name), number(metric.value), interval(metric), f"{metric.rows:,}"]
        lines.append(f"| {' | '.join(cells + baseline_cells(metric, facts.baseline.get(name)))} |")
    note = "The intervals tell how much a number would move with other test rows, not with another training. "
    note += f"Baseline: {baseline_words(facts.training.network.task)}."
    return "\n\n".join(["\n".join(lines), note, *_by_class(facts)])


def _by_class(facts: CardFacts) -> Iterator[str]:
    classes: Sequence[Mapping[str, Any]] = facts.evaluation.get("per_class", [])
    if not classes:
        return
    worst = sorted(classes, key=lambda entry: entry["f1"])[:_MOST_CLASSES]
    lines = ["| Class | Rows | Precision | Recall | F1 |", "|---|---|---|---|---|"]
    lines += [
        f"| {entry['class']} | {entry['rows']:,} | {number(entry['precision'])} | {number(entry['recall'])} | {number(entry['f1'])} |"
        for entry in worst
    ]
    shown = (
        f"The {len(worst)} weakest of {len(classes)} classes"
        if len(worst) < len(classes)
        else "Every class, the weakest first"
    )
    yield f"{shown}:\n\n" + "\n".join(lines)


def _certainty(facts: CardFacts) -> str:
    return "\n".join(f"* {line}" for line in _certainties(facts))


def _certainties(facts: CardFacts) -> Iterator[str]:
    conformal, outlier = facts.calibration.conformal, facts.calibration.outlier
    measured = {
        entry["name"]: Metric(**_without_name(entry))
        for entry in facts.evaluation.get("calibration", [])
    }
    if "calibration_error_before" in measured:
        before, after = (
            number(measured[name].value)
            for name in ("calibration_error_before", "calibration_error")
        )
        yield (
            f"Probabilities are calibrated inside the graph (temperature {number(facts.calibration.temperature)}): "
            f"their expected error on the test split is {after}, without it {before}."
        )
    if conformal.is_vacuous:
        yield f"Its sets and intervals exclude nothing: {conformal.rows:,} validation rows are too few for {conformal.coverage:.0%}."
    else:
        kind = (
            "a set of labels" if is_classification(facts.training.network.task) else "an interval"
        )
        yield (
            f"Beside each answer stands {kind} that is made to hold the truth for {conformal.coverage:.0%} of rows like the validation "
            f"rows (conformal prediction, {conformal.rows:,} rows). {_on_test('It does', measured.get('coverage'))}"
        )
    if outlier.threshold is None:
        yield f"The outlier score has no threshold: {outlier.rows:,} validation rows are too few for one."
    else:
        yield (
            f"Each answer has an outlier score. At most {outlier.share:.1%} of ordinary rows are meant to be above its threshold. "
            f"{_on_test('They are', measured.get('outliers'))}"
        )


def _on_test(what: str, share: Metric | None) -> str:
    if share is None:
        return "On the test split this was not measured."
    return f"{what} for {share.value:.1%} of the test split ({share.low:.1%} to {share.high:.1%}, n = {share.rows:,})."


def _without_name(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key != "name"}


def _weak(facts: CardFacts) -> str:
    return "\n".join(f"* {line}" for line in _weaknesses(facts)) or "Nothing was found."


def _weaknesses(facts: CardFacts) -> Iterator[str]:
    classes: Sequence[Mapping[str, Any]] = facts.evaluation.get("per_class", [])
    for entry in (entry for entry in facts.evaluation.get("slices", []) if entry["is_worse"]):
        bounds = f"{number(entry['low'])} to {number(entry['high'])}, n = {entry['rows']:,}"
        found = f"{_words(entry['metric'])} {number(entry['measured'])} ({bounds})"
        yield f"Worse than the rest where {entry['by']} is {entry['value']}: {found}."
    few = [f"{entry['class']} ({entry['rows']})" for entry in classes if entry["rows"] < _FEW_ROWS]
    if few:
        yield f"Fewer than {_FEW_ROWS} test rows, too few to say much: {', '.join(few)}."
    if facts.evaluation.get("leaked_rows"):
        yield f"{facts.evaluation['leaked_rows']} test rows leak from another split; the figures without them are in metrics/evaluate.json."
    for copy in facts.split.get("target_copies", []):
        yield f"Suspected leak, {copy['finding']}."
    unchecked = [
        _words(rule)
        for rule, reason in sorted(facts.clean["not_checked"].items())
        if reason.startswith("clean.rules.")
    ]
    if unchecked:
        yield f"Rules of cleaning that were switched off: {', '.join(unchecked)}."
    if is_classification(facts.training.network.task):
        yield "It always names one of its classes, whatever it is shown: see the outlier score."
    yield "Its figures hold for data like the test split. Other sources, devices, places and times were not measured."


def _files(models: Mapping[str, ModelFile], choice: Mapping[Provider, Choice]) -> str:
    lines = ["| Variant | File | Size | Precision | Meant for |", "|---|---|---|---|---|"]
    lines += [
        f"| {variant} | `{model.file}` | {size(model.bytes)} | {model.precision} | {', '.join(model.meant_for) or 'nothing'} |"
        for variant, model in models.items()
    ]
    chosen = [
        f"On {provider} the service's `auto` takes `{found.variant}`. {found.reason}"
        for provider, found in choice.items()
    ]
    certificate = (
        "How far each of them is from the trained network, on which provider, is in `certificate.json`, which names this bundle by digest. "
        "The service is not ready without it, and shows it at `GET /model`."
    )
    return "\n\n".join(["\n".join(lines), *chosen, certificate])


def _origin(facts: CardFacts) -> str:
    revision = facts.lineage.git_revision or "none (outside a git work tree)"
    dirty = " with changes that were not committed" if facts.lineage.git_dirty else ""
    versions = ", ".join(
        f"{name} {version}" for name, version in sorted(facts.training.versions.items())
    )
    return "\n".join(
        [
            f"* Git revision `{revision}`{dirty}.",
            f"* Weights SHA-256 `{facts.training.weights_sha256}`.",
            f"* Trained with {versions}.",
            "* `bundle.json` has every parameter and the digest of every input.",
        ]
    )


def _plural(count: object, one: str, many: str) -> str:
    return one if count == 1 else many


def _words(name: str) -> str:
    return name.replace("_", " ")
