"""export: writes the bundle: an ONNX graph for each variant, the leaderboard, `bundle.json`."""

from functools import partial
from pathlib import Path

from slipway.artifacts.bundle import load_bundle
from slipway.artifacts.locations import (
    BUNDLE,
    CALIBRATION,
    METRICS,
    MODEL,
    OOD_SCORE,
    PACKED,
    PRUNED,
)
from slipway.artifacts.uncertainty import read_calibration
from slipway.config.params import Params
from slipway.config.seals import sealed_params
from slipway.config.stage_run import run_stage
from slipway.data.store.packed import open_split, read_manifest
from slipway.metrics.scores import Resampling
from slipway.reports.evaluation.record import read_baseline, read_coverage, read_metrics
from slipway.reports.pages.leaderboard_page import leaderboard_page, leaderboard_text
from slipway.system import files

CLEAN, SPLIT = Path("reports/clean.json"), Path("reports/split.json")
LEADERBOARD = Path("reports/leaderboard.json")
PAGE = Path("reports/leaderboard.html")


def run(params: Params) -> None:
    """Export, check and measure every variant, choose those to serve, and write the bundle."""
    from slipway.export.background import background_note
    from slipway.export.bundle_writer import ExportRows, Pruned, Trained, write_bundle
    from slipway.export.certification.lineage import trace_lineage
    from slipway.export.graphs.variants import quantization_samples
    from slipway.export.model_card import CardFacts, model_card, read_report
    from slipway.training.networks.networks import (
        load_network,
        read_model_manifest,
        weights_file,
    )
    from slipway.training.pruning.result import load_pruned, read_pruned
    from slipway.training.uncertainty.calibrated_network import calibrated

    card, calibration = read_model_manifest(MODEL), read_calibration(CALIBRATION)
    smaller = read_pruned(PRUNED, card.weights_sha256)
    trained = Trained(
        network=calibrated(load_network(MODEL), calibration, OOD_SCORE),
        task=card.network.task,
        input=card.network.input,
        labels=card.network.classes,
        weights_sha256=card.weights_sha256,
        calibration=calibration,
        metrics=read_metrics(METRICS),
        coverage=read_coverage(METRICS),
        baseline=read_baseline(METRICS),
        pruned=Pruned(
            smaller.kind, load_pruned(PRUNED, smaller), smaller.weights_sha256, smaller.calibration
        )
        if smaller
        else None,
    )
    clean, split, evaluation = map(read_report, (CLEAN, SPLIT, METRICS))
    manifest = read_manifest(PACKED)
    train = open_split(PACKED, manifest, "train", verify=True)
    rows = ExportRows(
        samples=quantization_samples(
            PACKED, manifest, params.seed, params.export.quantization_samples
        ),
        validation=open_split(PACKED, manifest, "val", verify=True),
        train=train,
        test=open_split(PACKED, manifest, "test", verify=True),
        recent_from=clean.get("recent_from"),
    )
    read = [
        MODEL / weights_file(card.network.name),
        MODEL / "model.json",
        PACKED / "manifest.json",
        METRICS,
        CALIBRATION,
    ]
    read += [PRUNED / "model.json"]
    sealed = sealed_params(params.model_dump(mode="json", exclude={"compile", "verify"}))
    judging = ("gates", "slice_gates", "max_regression")  # the release, not the weights
    shaping = {key: value for key, value in sealed["evaluate"].items() if key not in judging}
    lineage = trace_lineage(sealed | {"evaluate": shaping}, read)
    resampling = Resampling(
        params.seed, params.evaluate.bootstrap_samples, params.evaluate.confidence
    )
    facts = CardFacts(
        card, calibration, trained.metrics, trained.baseline, lineage, clean, split, evaluation
    )
    with files.new_directory(BUNDLE) as folder:
        board = write_bundle(
            folder,
            trained,
            rows,
            params.export,
            resampling,
            lineage,
            card=partial(model_card, facts),
        )
    files.write_json(LEADERBOARD, board.model_dump(mode="json"))
    files.write_text(PAGE, leaderboard_page(board))
    print(leaderboard_text(board))
    if note := background_note(load_bundle(BUNDLE).manifest.input):
        print(note)


if __name__ == "__main__":
    run_stage(run)
