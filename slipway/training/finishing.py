"""The end of a training: the kept weights, put together and checked, become `artifacts/model/` and `metrics/train.json`."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from slipway.config.sealing import check_inputs
from slipway.system import files
from slipway.system.errors import TrainingError
from slipway.training.checkpoints.checkpoints import Save
from slipway.training.checkpoints.consolidation import consolidated_weights
from slipway.training.checkpoints.fingerprint import Fingerprint
from slipway.training.checkpoints.positions import Position
from slipway.training.distributed.strategies import requested_setup
from slipway.training.job import Job, count_parameters
from slipway.training.networks.networks import (
    ModelCard,
    Network,
    NetworkSpec,
    build_network,
    save_checkpoint,
)
from slipway.training.recipe.early_stopping import has_ended


def write_checkpoint(job: Job) -> None:
    """Write the model from the newest save, which is the last, and remove all saves.

    TrainingError if the save is not whole. SealError if the inputs changed; the saves stay then.
    """
    save, problems = job.saves.newest()
    if save is None or not has_ended(save.history, job.params):
        raise TrainingError(
            f"after the last epoch the newest whole save is of epoch {save.epoch if save else 0}: {'; '.join(problems)}. "
            "Run `dvc repro` again; it goes on from there."
        )
    weights = consolidated_weights(job.saves.state(Position(save.kept_epoch, 0)))
    card = _model_card(job, save, count_parameters(_network_with(job.spec, weights)))
    files.write_json(job.paths.metrics, _metrics(card, save))
    save_checkpoint(job.paths.checkpoint, card, weights)
    check_inputs()
    job.saves.remove()
    if card.stopped_early:
        print(
            f"stopped   after epoch {save.epoch}, {job.params.early_stopping_patience} after the lowest validation loss"
        )
    print(
        f"kept epoch {save.kept_epoch} of {save.epoch} ({job.params.keep}) in {job.paths.checkpoint}, "
        f"measured on {len(job.data.val):,} validation rows"
    )


def _model_card(job: Job, save: Save, num_parameters: int) -> ModelCard:
    params = job.params.model_dump(mode="json")
    return ModelCard(
        format_version=3,
        network=job.spec,
        num_parameters=num_parameters,
        weights_sha256="",  # known when they are written
        epochs=save.epoch,
        stopped_early=save.epoch < job.params.epochs,
        kept_epoch=save.kept_epoch,
        metrics=save.history[save.kept_epoch - 1],
        requested=requested_setup(job.params),
        actual=save.actual,
        stretches=save.stretches,
        seed=job.seed,
        params=params,
        digests=_digests(job.fingerprint, files.digest_json(params)),
        versions=job.fingerprint.versions,
        git_revision=_git_revision(job.paths.root),
    )


def _metrics(card: ModelCard, save: Save) -> dict[str, object]:
    return {
        "epochs": card.epochs,
        "stopped_early": card.stopped_early,
        "kept_epoch": card.kept_epoch,
        **{
            name.replace("/", "_"): value
            for name, value in card.metrics.items()
            if name != "learning_rate"
        },
        "skipped_steps": int(
            save.history[-1]["skipped_steps"]
        ),  # of the whole run, not only up to the kept epoch
        "strategy": card.actual.strategy,
        "precision": card.actual.precision,
        "processes": card.actual.world_size,
    }


def _network_with(spec: NetworkSpec, weights: Mapping[str, Tensor]) -> Network:
    """Strictly: what was put together from shards has every weight of the network, in its shape, and nothing else.

    In a new network, since ZeRO-3 leaves the trained one with empty parameters.
    """
    network = build_network(spec)
    network.load_state_dict(dict(weights), strict=True)
    return network


def _digests(fingerprint: Fingerprint, params: str) -> dict[str, str]:
    return {
        "fingerprint": fingerprint.digest,
        "params": params,
        **fingerprint.data,
        **fingerprint.code,
    }


def _git_revision(root: Path) -> str | None:
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()
