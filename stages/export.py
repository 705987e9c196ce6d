"""Trained network to bundle: one ONNX graph per variant in `export.variants`, and `bundle.json`."""

from pathlib import Path

from slipway import files
from slipway.calibration import read_calibration
from slipway.command import run_stage
from slipway.data.packed import open_split, read_manifest
from slipway.params import Params
from slipway.reports.evaluation import read_metrics

CHECKPOINT = Path("artifacts/checkpoint")
PACKED = Path("data/packed")
METRICS = Path("metrics/evaluate.json")
CALIBRATION = Path("artifacts/calibration.json")
OUTLIER_SCORE = Path("artifacts/outlier_score.safetensors")
BUNDLE = Path("artifacts/bundle")


def run(params: Params) -> None:
    """Export, check and bundle."""
    from slipway.export.bundling import ExportRows, Trained, report_table, write_bundle
    from slipway.export.canary import choose_canary
    from slipway.export.lineage import trace_lineage
    from slipway.export.variants import calibration_rows
    from slipway.training.calibrated import calibrated
    from slipway.training.networks import load_network, read_model_card

    card, calibration = read_model_card(CHECKPOINT), read_calibration(CALIBRATION)
    trained = Trained(
        network=calibrated(load_network(CHECKPOINT), calibration, OUTLIER_SCORE),
        task=card.network.task,
        input=card.network.input,
        labels=card.network.classes,
        weights_sha256=card.weights_sha256,
        calibration=calibration,
        metrics=read_metrics(METRICS),
    )
    manifest = read_manifest(PACKED)
    train = open_split(PACKED, manifest, "train", verify=True)
    validation = open_split(PACKED, manifest, "val", verify=True)
    rows = ExportRows(
        calibration=calibration_rows(train, manifest.input, params.seed, params.export.calibration_rows),
        validation=validation.inputs,
        canary=choose_canary(validation, params.seed, params.export.canary_rows),
    )
    read = [CHECKPOINT / "weights.safetensors", CHECKPOINT / "model.json", PACKED / "manifest.json", METRICS, CALIBRATION]
    lineage = trace_lineage(params.model_dump(mode="json", exclude={"compile", "verify"}), read)
    with files.new_directory(BUNDLE) as folder:
        reports = write_bundle(folder, trained, rows, params.export, lineage)
    print(report_table(reports))


if __name__ == "__main__":
    run_stage(run)
