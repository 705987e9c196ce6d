"""evaluate: measure the trained network on the test split, as a whole and slice by slice, and record its quality gates. In one process."""

from functools import partial
from pathlib import Path

from slipway.artifacts.gates import gates_text, write_gates
from slipway.artifacts.uncertainty import write_calibration
from slipway.config.command import run_stage
from slipway.config.params import Params
from slipway.config.sections import DataParams
from slipway.data.engine.rows import SPLIT_ROWS, read_table
from slipway.data.sources.archives import ArchiveLimits, unpacked
from slipway.data.store.packed import PackedManifest, PackedSplit, open_split, read_manifest
from slipway.data.store.transform_table import TRANSFORM_TABLE
from slipway.data.tables.raw_columns import read_raw_columns
from slipway.export.reference_model import ask_released, open_released
from slipway.metrics.scores import Resampling
from slipway.reports.evaluation.measuring import judge, measure_rows
from slipway.reports.evaluation.plots import write_plots
from slipway.reports.evaluation.predictions import write_predictions
from slipway.reports.evaluation.record import write_evaluation
from slipway.reports.evaluation.reference_comparison import ReleasedAnswers
from slipway.reports.evaluation.slices import Dimension, built_in_dimensions, of_column
from slipway.reports.evaluation.text import evaluation_text
from slipway.reports.evaluation.uncertainty import UncertaintyReport, uncalibrated
from slipway.reports.pages.evaluation_page import evaluation_page
from slipway.system import files
from slipway.system.errors import SchemaError
from slipway.training.networks.networks import NetworkSpec, load_network
from slipway.training.telemetry.curves import read_curves
from slipway.training.uncertainty.calibration import Calibrator
from slipway.training.uncertainty.ood_score import save_ood_score
from slipway.training.uncertainty.prediction import default_device

CHECKPOINT = Path("artifacts/model")
PACKED = Path("data/packed")
SPLIT = Path("data/split")
LIVE = Path("reports/live")
CALIBRATION = Path("artifacts/calibration.json")
OUTLIER_SCORE = Path("artifacts/outlier_score.safetensors")
PREDICTIONS = Path("artifacts/predictions.parquet")
METRICS, GATES = Path("metrics/evaluate.json"), Path("metrics/gates.json")
CONFUSION, SCATTER = Path("reports/confusion.csv"), Path("reports/scatter.csv")
RELIABILITY, SLICES = Path("reports/reliability.csv"), Path("reports/slices.csv")
PAGE = Path("reports/evaluate.html")


def run(params: Params) -> None:
    """Write the predictions, the metrics, the slices, the results of the gates and the page."""
    wanted, device = params.evaluate, default_device()
    manifest = read_manifest(PACKED)
    train, val, test = (
        open_split(PACKED, manifest, split, verify=True) for split in ("train", "val", "test")
    )
    network = load_network(CHECKPOINT)
    _check_fit(network.spec, manifest.classes)
    dimensions, released = _dimensions(params, test, manifest), _released(params, test, manifest)
    calibrator = Calibrator(network, wanted, params.seed, device)
    fitted = calibrator.fit(train, val)
    raw = calibrator.predict(test.inputs, fitted.score)
    resampling = Resampling(params.seed, wanted.bootstrap_samples, wanted.confidence)
    worth = UncertaintyReport(
        fitted.calibration,
        test.targets,
        fitted.apply(network, raw),
        uncalibrated(raw.outputs, manifest.task),
        resampling,
    )
    evaluation = measure_rows(test, manifest, train.targets, worth, dimensions, released, wanted)
    gates = judge(evaluation, wanted, resampling)
    write_calibration(CALIBRATION, fitted.calibration)
    save_ood_score(OUTLIER_SCORE, fitted.score)
    write_predictions(PREDICTIONS, evaluation)
    write_plots(evaluation, CONFUSION, SCATTER, RELIABILITY, SLICES)
    write_evaluation(METRICS, evaluation)
    write_gates(GATES, gates, METRICS)
    about = f"{network.spec.name}, {len(test)} test rows, {wanted.bootstrap_samples} bootstrap resamples, on {device}"
    files.write_text(
        PAGE,
        evaluation_page(evaluation, gates, test.inputs, manifest.input, read_curves(LIVE), about),
    )
    print(
        f"evaluate: {about}\n{evaluation_text(evaluation, wanted.top_k)}\n{gates_text(gates)}\n  the worst errors: {PAGE}"
    )


def _dimensions(params: Params, test: PackedSplit, manifest: PackedManifest) -> list[Dimension]:
    """Before the network answers: a name that is wrong is told at once."""
    named = params.evaluate.slices
    data = _raw_data(params) if named else params.data
    columns = read_raw_columns(
        data, named, test.ids, test.sources, PACKED / "test" / TRANSFORM_TABLE
    )
    built_in = built_in_dimensions(test, manifest, read_table(SPLIT / "rows.parquet", SPLIT_ROWS))
    return [*built_in, *map(of_column, columns)]


def _released(
    params: Params, test: PackedSplit, manifest: PackedManifest
) -> ReleasedAnswers | None:
    if params.evaluate.reference_model is None:
        return None
    return ask_released(
        open_released(Path(params.evaluate.reference_model), manifest),
        test,
        PACKED,
        manifest,
        partial(_raw_data, params),
    )


def _raw_data(params: Params) -> DataParams:
    return unpacked(
        params.data, ArchiveLimits(params.clean.max_archive_members, params.clean.max_archive_ratio)
    )


def _check_fit(spec: NetworkSpec, classes: list[str]) -> None:
    if spec.classes != classes:
        raise SchemaError(
            f"{CHECKPOINT} was trained on the classes {spec.classes}, {PACKED} has {classes}. Run `dvc repro train`."
        )


if __name__ == "__main__":
    run_stage(run)
