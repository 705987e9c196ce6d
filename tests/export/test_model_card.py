"""The model card: figures from the stages' reports, the user's purpose, and its digest."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipway.artifacts import locations
from slipway.artifacts.bundle import CARD, Lineage, load_bundle
from slipway.config.params import Params
from slipway.export.model_card import CardFacts, model_card, read_report
from slipway.reports.evaluation.record import read_baseline, read_metrics
from slipway.system.errors import BundleError, SchemaError
from slipway.training.networks.networks import read_model_manifest
from stages import export
from tests.export.conftest import Project


def facts_of(project: Project, params: Params) -> CardFacts:
    reports = project.root / "reports"
    return CardFacts(
        training=read_model_manifest(project.checkpoint).model_copy(
            update={"params": params.train.model_dump()}
        ),
        calibration=project.calibration(),
        metrics=read_metrics(project.root / "metrics/evaluate.json"),
        baseline=read_baseline(project.root / "metrics/evaluate.json"),
        lineage=Lineage(
            git_revision="abc",
            git_dirty=True,
            params=params.model_dump(mode="json"),
            data=None,
            digests={},
        ),
        clean=read_report(reports / "clean.json"),
        split=read_report(reports / "split.json"),
        evaluation=read_report(project.root / "metrics/evaluate.json"),
    )


@pytest.mark.process
def test_every_figure_of_the_model_card_was_measured(
    classifier: Project, export_params: Params
) -> None:
    facts, manifest = facts_of(classifier, export_params), classifier.bundle().manifest
    text = model_card(facts, manifest.models, manifest.choice)
    accuracy = facts.metrics["accuracy"]
    assert (
        f"accuracy is **{accuracy.value:.4f}** "
        f"(95 % interval {accuracy.low:.4f} to {accuracy.high:.4f})" in text
    )
    difference = accuracy.value - facts.baseline["accuracy"]
    assert f"| {facts.baseline['accuracy']:.4f} | {difference:+.4g} |" in text
    assert "Baseline: the majority class of the training rows" in text
    assert "169 rows read, 167 kept, 2 refused (2 exact duplicate)" in text
    assert "train 96, val 30, test 41" in text
    assert "one of 3 classes" in text
    assert "`amber`, `blue`, `green`" in text
    assert "Git revision `abc` with changes that were not committed" in text
    assert "switched off: blurred" in text
    assert all(
        f"| {variant} | `{model.file}` |" in text for variant, model in manifest.models.items()
    )
    assert all(choice.reason.rstrip(".") in text for choice in manifest.choice.values())


@pytest.mark.process
def test_the_model_card_of_a_regressor_names_the_target_and_no_classes(
    regressor: Project, export_params: Params
) -> None:
    params = export_params.model_copy(
        update={"data": export_params.data.model_copy(update={"target_column": "level"})}
    )
    text = model_card(facts_of(regressor, params), regressor.bundle().manifest.models, {})
    assert text.startswith("# Image regression: level")
    assert "in the unit of `level`" in text
    assert "rmse" in text
    assert "F1" not in text


def test_model_card_quotes_the_purpose_or_states_that_it_is_missing(
    evaluated_classifier: Project, export_params: Params
) -> None:
    facts = facts_of(evaluated_classifier, export_params)
    assert "Nobody has written down yet what this model is for" in model_card(facts, {}, {})
    written = {
        **facts.lineage.params,
        "export": {**facts.lineage.params["export"], "purpose": "Sorts fruit. Not for people.\n"},
    }
    text = model_card(
        replace(facts, lineage=facts.lineage.model_copy(update={"params": written})), {}, {}
    )
    assert "## Meant for\n\nSorts fruit. Not for people.\n" in text
    assert "Nobody has written" not in text


def test_model_card_lists_weaknesses_of_the_model(
    evaluated_classifier: Project, export_params: Params
) -> None:
    facts = facts_of(evaluated_classifier, export_params)
    slice_ = {
        "by": "brightness",
        "value": "below 40",
        "rows": 12,
        "metric": "accuracy",
        "measured": 0.5,
        "low": 0.3,
        "high": 0.7,
    }
    slices = [slice_ | {"is_worse": True}, slice_ | {"value": "above 40", "is_worse": False}]
    text = model_card(
        replace(facts, evaluation={**facts.evaluation, "slices": slices, "leaked_rows": 3}), {}, {}
    )
    assert (
        "Worse than the rest if brightness is below 40: "
        "accuracy 0.5000 (0.3000 to 0.7000, n = 12)." in text
    )
    assert "above 40" not in text
    assert "3 test rows leak" in text
    assert "too few to say much: amber (14)" in text


@pytest.mark.process
def test_the_export_stage_bundles_a_model_card_that_must_not_change(
    classifier: Project, export_params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("data", "artifacts", "metrics", "reports"):
        (tmp_path / name).mkdir()
        for path in (classifier.root / name).iterdir():
            if path.name != "bundle":
                (tmp_path / name / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    export.run(
        export_params.model_copy(
            update={"export": export_params.export.model_copy(update={"variants": ["fp32"]})}
        )
    )
    bundle = load_bundle(locations.BUNDLE)
    bundle.verify()
    card = bundle.card()
    assert card is not None
    assert card.startswith("# Image classification: one of 3 classes")
    (locations.BUNDLE / CARD).write_text(card.replace("41", "42"))
    with pytest.raises(BundleError, match="was altered"):
        bundle.verify()
    (locations.BUNDLE / CARD).unlink()
    with pytest.raises(BundleError, match="is missing"):
        bundle.verify()


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "is missing"), ("{", "is not JSON"), (json.dumps([1]), "holds list")],
)
def test_the_model_card_refuses_a_malformed_report(
    tmp_path: Path, content: Any, message: str
) -> None:
    if content is not None:
        (tmp_path / "clean.json").write_text(content)
    with pytest.raises(SchemaError, match=message):
        read_report(tmp_path / "clean.json")
