"""evaluate: measure the trained network on the test split, in one process, and fail if a gate is missed."""

from pathlib import Path

from slipway import files
from slipway.calibration import write_calibration
from slipway.command import run_stage
from slipway.contract import is_classification
from slipway.data.packed import open_split, read_manifest
from slipway.errors import SchemaError
from slipway.metrics import Resampling, measure
from slipway.params import Params
from slipway.reports.calibration import Worth, uncalibrated
from slipway.reports.calibration_section import in_words
from slipway.reports.console import interval, number, text_table
from slipway.reports.evaluation import Evaluation, apply_gates, headlines, measure_without_leaked, raise_missed, write_evaluation
from slipway.reports.evaluation_page import evaluation_page
from slipway.reports.predictions import write_confusion, write_predictions
from slipway.training.calibrating import Calibrator
from slipway.training.curves import read_curves
from slipway.training.networks import NetworkSpec, load_network
from slipway.training.outlier_score import save_outlier_score
from slipway.training.prediction import default_device

CHECKPOINT = Path("artifacts/checkpoint")
PACKED = Path("data/packed")
LIVE = Path("reports/live")
CALIBRATION = Path("artifacts/calibration.json")
OUTLIER_SCORE = Path("artifacts/outlier_score.safetensors")
PREDICTIONS = Path("artifacts/predictions.parquet")
METRICS = Path("metrics/evaluate.json")
CONFUSION = Path("reports/confusion.csv")
PAGE = Path("reports/evaluate.html")


def run(params: Params) -> None:
    """Write the predictions, the metrics and the page, then judge the gates."""
    wanted, device = params.evaluate, default_device()
    manifest = read_manifest(PACKED)
    train, val, test = (open_split(PACKED, manifest, split, verify=True) for split in ("train", "val", "test"))
    network = load_network(CHECKPOINT)
    _check_fit(network.spec, manifest.classes)
    calibrator = Calibrator(network, wanted, params.seed, device)
    fitted = calibrator.fit(train, val)
    raw = calibrator.predict(test.inputs, fitted.score)
    answers = fitted.apply(network, raw)
    outputs = answers.outputs
    resampling = Resampling(params.seed, wanted.bootstrap_samples, wanted.confidence)
    metrics = measure(manifest.task, test.targets, outputs, resampling)
    without = measure_without_leaked(manifest.task, test.targets, outputs, test.leaked, resampling)
    before = uncalibrated(raw.outputs) if is_classification(manifest.task) else None
    worth = Worth(fitted.calibration, test.targets, answers, before, resampling)
    evaluation = Evaluation(
        manifest.task, manifest.classes, test.ids, test.sources, test.targets, outputs, metrics, test.leaked, without, worth
    )
    gates = apply_gates(wanted.gates, metrics)
    write_calibration(CALIBRATION, fitted.calibration)
    save_outlier_score(OUTLIER_SCORE, fitted.score)
    write_predictions(PREDICTIONS, evaluation)
    write_confusion(CONFUSION, evaluation)
    write_evaluation(METRICS, evaluation)
    about = f"{network.spec.name}, {len(test)} test rows, {wanted.bootstrap_samples} bootstrap resamples, on {device}"
    files.write_text(PAGE, evaluation_page(evaluation, gates, test.inputs, manifest.input, read_curves(LIVE), about))
    print(f"evaluate: {about}")
    first = [(name, metrics[name]) for name in headlines(manifest.task)]
    first += worth.metrics.items()
    first += [(f"{name}_without_leaked", without[name]) for name in headlines(manifest.task) if name in without]
    print(text_table(["metric", "value", "interval"], [[name, number(metric.value), interval(metric)] for name, metric in first], "  "))
    print(f"  {in_words(worth)}")
    print(f"  the worst errors: {PAGE}")
    raise_missed(gates)


def _check_fit(spec: NetworkSpec, classes: list[str]) -> None:
    if spec.classes != classes:
        raise SchemaError(f"{CHECKPOINT} was trained on the classes {spec.classes}, {PACKED} has {classes}. Run `dvc repro train`.")


if __name__ == "__main__":
    run_stage(run)
