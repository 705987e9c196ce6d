"""evaluate: measures the network on the test split, in total and by slice; applies the gates."""

from functools import partial
from pathlib import Path

from slipway.artifacts.gates import gates_text, write_gates
from slipway.artifacts.locations import (
    CALIBRATION,
    GATES,
    LIVE,
    METRICS,
    MODEL,
    OOD_SCORE,
    PACKED,
    PREDICTIONS,
    SPLIT,
)
from slipway.artifacts.uncertainty import write_calibration
from slipway.config.params import Params
from slipway.config.sections import DataParams
from slipway.config.stage_run import run_stage
from slipway.data.engine.rows import SPLIT_ROWS, read_table
from slipway.data.sources.archives import ArchiveLimits, unpacked
from slipway.data.store.packed import PackedManifest, PackedSplit, open_split, read_manifest
from slipway.data.store.transform_table import TRANSFORM_TABLE
from slipway.data.tables.raw_columns import read_raw_columns
from slipway.export.certification.timings import member_speeds
from slipway.export.reference_model import answer_test_rows, open_reference
from slipway.metrics.scores import Resampling
from slipway.metrics.user_metrics import load_user_metrics
from slipway.reports.evaluation.gates import judge
from slipway.reports.evaluation.importance import permutation_importance
from slipway.reports.evaluation.record import evaluate_rows, write_evaluation
from slipway.reports.evaluation.reference_comparison import ReferenceAnswers
from slipway.reports.evaluation.slices import Dimension, built_in_dimensions, of_column, of_sources
from slipway.reports.evaluation.tables import write_plots, write_predictions
from slipway.reports.evaluation.text import evaluation_text
from slipway.reports.evaluation.uncertainty import UncertaintyReport, uncalibrated
from slipway.reports.pages.evaluation_page import evaluation_page
from slipway.system import files
from slipway.system.errors import SchemaError
from slipway.training.networks.networks import load_network
from slipway.training.telemetry.curves import read_curves
from slipway.training.uncertainty.calibration import Calibrator
from slipway.training.uncertainty.member_answers import ensemble_answers
from slipway.training.uncertainty.ood_score import save_ood_score
from slipway.training.uncertainty.prediction import default_device

CONFUSION, SCATTER = Path("reports/confusion.csv"), Path("reports/scatter.csv")
RELIABILITY, SLICES = Path("reports/reliability.csv"), Path("reports/slices.csv")
PAGE = Path("reports/evaluate.html")


def run(params: Params) -> None:
    """Write the predictions, the metrics, the slices, the gate results and the page."""
    settings, device = params.evaluate, default_device()
    manifest = read_manifest(PACKED)
    train, val, test = (
        open_split(PACKED, manifest, split, verify=True) for split in ("train", "val", "test")
    )
    network = load_network(MODEL)
    if network.spec.classes != manifest.classes:
        raise SchemaError(
            f"{MODEL} was trained on the classes {network.spec.classes}, "
            f"{PACKED} has {manifest.classes}. Run `dvc repro train`."
        )
    # Loaded before the predictions, so that a wrong name is reported at once.
    dimensions = _dimensions(params, test, manifest)
    reference = _reference(params, test, manifest)

    calibrator = Calibrator(network, settings, params.seed, device)
    fitted = calibrator.fit(train, val)
    raw = calibrator.predict(test.inputs, fitted.score)
    resampling = Resampling(params.seed, settings.bootstrap_samples, settings.confidence)
    uncertainty = UncertaintyReport(
        manifest.task,
        fitted.calibration,
        test.targets,
        fitted.apply(network, raw),
        uncalibrated(raw.outputs, manifest.task),
        resampling,
    )
    evaluation = evaluate_rows(
        test,
        manifest,
        train.targets,
        uncertainty,
        dimensions,
        reference,
        settings,
        load_user_metrics(settings.metrics),
        permutation_importance(
            manifest,
            test,
            lambda rows: fitted.apply(network, calibrator.predict(rows, fitted.score)).outputs,
            params.seed,
            fitted.calibration.thresholds,
            network.column_gains(),
        ),
        ensemble_answers(
            MODEL,
            network,
            test,
            settings.batch_size,
            device,
            partial(member_speeds, train=train, val=val, params=settings, seed=params.seed),
        ),
    )
    gates = judge(evaluation, settings, resampling)

    write_calibration(CALIBRATION, fitted.calibration)
    save_ood_score(OOD_SCORE, fitted.score)
    write_predictions(PREDICTIONS, evaluation)
    write_plots(evaluation, CONFUSION, SCATTER, RELIABILITY, SLICES)
    write_evaluation(METRICS, evaluation)
    write_gates(GATES, gates, METRICS)
    about = (
        f"{network.spec.name}, {len(test)} test rows, "
        f"{settings.bootstrap_samples} bootstrap resamples, on {device}"
    )
    files.write_text(
        PAGE,
        evaluation_page(evaluation, gates, test.inputs, manifest.input, read_curves(LIVE), about),
    )
    print(
        f"evaluate: {about}; every metric and the worst errors: {PAGE}",
        evaluation_text(evaluation, settings.top_k),
        gates_text(gates),
        sep="\n",
    )


def _dimensions(params: Params, test: PackedSplit, manifest: PackedManifest) -> list[Dimension]:
    names = params.evaluate.slices
    data = _raw_data(params) if names or params.data.sources else params.data
    transforms = PACKED / "test" / TRANSFORM_TABLE
    columns = read_raw_columns(data, names, test.ids, test.sources, transforms)
    built_in = built_in_dimensions(test, manifest, read_table(SPLIT / "rows.parquet", SPLIT_ROWS))
    return [*built_in, *of_sources(data, test.sources), *map(of_column, columns)]


def _reference(
    params: Params, test: PackedSplit, manifest: PackedManifest
) -> ReferenceAnswers | None:
    if params.evaluate.reference_model is None:
        return None
    bundle = open_reference(Path(params.evaluate.reference_model), manifest)
    return answer_test_rows(bundle, test, PACKED, manifest, partial(_raw_data, params))


def _raw_data(params: Params) -> DataParams:
    return unpacked(
        params.data,
        ArchiveLimits(params.clean.max_archive_members, params.clean.max_archive_ratio),
    )


if __name__ == "__main__":
    run_stage(run)
