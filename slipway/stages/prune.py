"""Prunes the trained network for `export` if `prune.kind` is set."""

from pathlib import Path

from slipway.artifacts.locations import AUGMENTED, MODEL, PACKED, PRUNED
from slipway.config.params import Params
from slipway.config.sections import MeasuringParams
from slipway.config.stage_run import run_stage
from slipway.system import files

REPORT = Path("reports/prune.json")


def run(params: Params) -> None:
    """Prune, fine-tune and calibrate, or record that `prune.kind` is null."""
    if params.prune.kind:
        _prune(params)
        return
    with files.new_directory(PRUNED) as folder:
        files.write_json(folder / "model.json", {"format_version": 2, "kind": None})
    files.write_json(REPORT, {"kind": None})


def _prune(params: Params) -> None:
    from slipway.training.job import open_data
    from slipway.training.pruning.result import save_pruned
    from slipway.training.pruning.run import prune

    data = open_data(PACKED, AUGMENTED)
    measuring = MeasuringParams(
        batch_size=params.evaluate.batch_size,
        bootstrap_samples=params.evaluate.bootstrap_samples,
        confidence=params.evaluate.confidence,
        calibration=params.evaluate.calibration,
        decision=params.evaluate.decision,
        coverage=params.evaluate.coverage,
        ood_fraction=params.evaluate.ood_fraction,
    )
    found = prune(params.seed, params.train, params.prune, measuring, data, MODEL)
    save_pruned(PRUNED, found.manifest, found.weights, found.fitted.score)
    files.write_json(REPORT, found.report())
    print(found.text())


if __name__ == "__main__":
    run_stage(run)
