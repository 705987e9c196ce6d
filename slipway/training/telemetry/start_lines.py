"""What a training says of itself before its first step."""

from slipway.config.sections import TrainParams
from slipway.training.checkpoints.checkpoints import Save
from slipway.training.checkpoints.positions import Position
from slipway.training.job import Job


def print_start(job: Job, num_parameters: int, notes: list[str], resumed: Save | None) -> None:
    """The network, the rows, the step, how it runs and why, what is noteworthy, and where it goes on."""
    spec, shape, placement, num_train = job.spec, job.shape, job.placement, job.data.num_train
    answers = f"{len(spec.classes)} classes" if spec.classes else "a number"
    print(
        f"network   {spec.name}, {num_parameters:,} parameters, {'x'.join(map(str, spec.input.shape))} -> {answers}"
    )
    print(f"rows      {num_train:,} for training, {len(job.data.val):,} for validation")
    print(
        f"step      {shape.batch_size} rows = {shape.per_device} per device x {shape.world_size} process{'es' * (shape.world_size > 1)} "
        f"x {shape.num_accumulated} accumulated; {job.steps_per_epoch} steps per epoch"
    )
    print(
        f"runs as   {placement.strategy}, {placement.precision}, {placement.world_size} on {placement.accelerator}"
    )
    if job.params.pretrained:
        digest = job.fingerprint.data["pretrained"]
        print(
            f"weights   {job.params.pretrained}, SHA-256 {digest[:12]}, for pixels of mean {_listed(spec.mean)}, std {_listed(spec.std)}"
        )
    for reason in placement.reasons:
        print(f"  auto    {reason}")
    for note in [*notes, *without_effect(job.params, spec.classes)]:
        print(f"note      {note}")
    if resumed:
        print(f"resumed   {in_words(resumed.position)}", flush=True)
        saved, now, own = resumed.stretches[-1], job.stretch(resumed), job.stretch()
        if not saved.is_cut_as(now):
            print(
                f"note      saved by {saved}, resumed by {now}: the same rows in each step, but other last bits"
            )
        elif now.threads != own.threads:
            print(
                f"note      runs with {now.threads} threads each as before, for the same bits; a new training takes {own.threads}"
            )


def without_effect(params: TrainParams, classes: list[str]) -> list[str]:
    """What is asked for and does nothing here; `classes` is empty for a numeric target."""
    if params.label_smoothing and not classes:
        return [
            f"train.label_smoothing {params.label_smoothing:g} is without effect for a numeric target"
        ]
    return []


def in_words(position: Position) -> str:
    """Where a training stands."""
    return f"after epoch {position.epoch}" + (
        f" and {position.step} steps of the next" if position.step else ""
    )


def _listed(values: list[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)
