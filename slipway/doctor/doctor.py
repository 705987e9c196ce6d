"""`make doctor`: where the time of a training step goes on this machine and this data, and what would make it shorter.

`python -m slipway.doctor.doctor` measures the training that params.yaml asks for, on the packed data, names the bottleneck,
and proposes a patch of params.yaml with the gain that is to be expected. `--prove` measures the patch beside the present
settings; `--apply` writes it to params.yaml if that shows a gain. Nothing is trained that is kept.
"""

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from slipway.config.command import run_stage
from slipway.config.edit import propose
from slipway.config.params import Params
from slipway.config.sections import TrainParams
from slipway.data.store.jpeg_inputs import JPEG
from slipway.data.store.packed import PackedManifest, read_manifest
from slipway.doctor.cures import Candidate, candidates, find_bottleneck
from slipway.doctor.diagnosis import (
    Diagnosis,
    Proof,
    Proposal,
    Spread,
    Trial,
    account_of,
    median_loader,
    spread,
)
from slipway.doctor.forecast import NOTHING_GAINED, Facts, best_num_workers, expected_step_ms
from slipway.doctor.loader_times import LoaderTimes
from slipway.doctor.machine import describe_machine
from slipway.doctor.raw_care import look_at_raw_data
from slipway.doctor.raw_store import raw_store
from slipway.doctor.step_times import Round
from slipway.doctor.timed_processes import Measured, Project
from slipway.kinds.registry import is_table
from slipway.reports.pages.doctor_page import doctor_page, doctor_text
from slipway.system import files
from slipway.system.broken_pipe import quiet_when_unread
from slipway.system.cores import num_cores
from slipway.system.errors import ParamsError, TrainingError
from slipway.training.distributed.strategies import Placement, place, this_host

NUM_ROUNDS = 5
_BUSY = 0.2  # of a step
_HOPELESS = 2.0  # times as slow in its first round: a trial ends there
REPORT, PAGE, PARAMS = Path("reports/doctor.json"), Path("reports/doctor.html"), Path("params.yaml")


class Patient:
    """A project whose training is looked at."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.train: TrainParams = project.params.train
        self.manifest: PackedManifest = read_manifest(project.packed)
        self.placement: Placement = place(self.train, this_host())
        if self.placement.num_nodes > 1:
            raise ParamsError(
                f"train.num_nodes is {self.placement.num_nodes}; the doctor measures one node. Set it to 1 for this."
            )

    @property
    def runs_as(self) -> str:
        """As the start of a training says it."""
        placement = self.placement
        return f"{placement.strategy}, {placement.precision}, {placement.world_size} on {placement.accelerator}"

    @property
    def is_jpeg(self) -> bool:
        """Whether training images are decoded for each batch."""
        return (self.project.packed / "train" / JPEG).exists()

    @property
    def num_accumulated(self) -> int:
        """Batches in a step."""
        from slipway.training.batches.batches import cut_step

        return cut_step(
            self.train.batch_size, self.placement.world_size, self.train.max_batch_per_device
        ).num_accumulated


def examine(project: Project, *, trials: bool = True, num_rounds: int = NUM_ROUNDS) -> Diagnosis:
    """Measure, name the bottleneck, propose. Without `trials` only loading is thought of."""
    patient = Patient(project)
    with ExitStack() as stack:
        present = stack.enter_context(Measured(project, "present"))
        still = stack.enter_context(Measured(project, "one batch", fixed_batch=True))
        loader = stack.enter_context(
            Measured(project, "loader", loader=True, strategy="single", devices=1)
        )
        found = _rounds(patient, present, still, loader, num_rounds)
        account, facts = found
        parts = {part: value.median for part, value in account.parts_ms.items()}
        bottleneck = find_bottleneck(parts, facts, is_jpeg=patient.is_jpeg)
        tried = _trials(patient, still, facts, num_rounds) if trials else []
    raw = (
        None
        if is_table(project.params.data.task)
        else look_at_raw_data(project.params, project.root)
    )
    return Diagnosis(
        machine=describe_machine(),
        runs_as=patient.runs_as,
        account=account,
        bottleneck=bottleneck,
        loader=facts.loader,
        raw=raw,
        trials=tried,
        proposal=_propose(patient, facts, tried),
        proof=None,
        notes=[*_notes(patient, facts), *_busy(account.queued_share)],
    )


def prove(project: Project, proposal: Proposal, num_rounds: int = NUM_ROUNDS) -> Proof:
    """Measure the proposal and the present settings in turns."""
    train = {
        place.removeprefix("train."): value
        for place, value in proposal.changes.items()
        if place.startswith("train.")
    }
    cured = project
    if proposal.changes.get("precompute.encoding") == "raw":
        cured = raw_store(project)
    with Measured(project, "before") as before, Measured(cured, "after", **train) as after:
        before.time_steps(), after.time_steps()
        pairs = [(before.time_steps(), after.time_steps()) for _ in range(num_rounds)]
    gain = spread(old.step_ms / new.step_ms for old, new in pairs)
    account = account_of([new for _, new in pairs], project.params.train.batch_size)
    return Proof(account=account, expected_gain=proposal.expected_gain, measured_gain=gain)


def _rounds(
    patient: Patient, present: Measured, still: Measured, loader: Measured, num_rounds: int
) -> Any:
    on_gpu, silent_too = (
        patient.placement.accelerator == "gpu",
        patient.placement.strategy == "ddp" and patient.placement.world_size > 1,
    )
    present.time_steps(), still.time_steps(), loader.time_loader()  # warm-up
    steps: list[Round] = []
    parts: list[Round] = []
    silent: list[Round] = []
    alone: list[Round] = []
    loads: list[LoaderTimes] = []
    watched = on_gpu or patient.placement.world_size > 1
    for _ in range(num_rounds):
        steps.append(present.time_steps())
        parts += [present.time_steps(synchronised=True)] if watched else []
        silent += [present.time_steps(synchronised=True, communicates=False)] if silent_too else []
        alone.append(still.time_steps())
        loads.append(loader.time_loader())
    account = account_of(steps, patient.train.batch_size, parts or None, silent or None)
    times = median_loader(loads)
    facts = Facts(
        step_ms=account.step_ms.median,
        data_ms=account.parts_ms["data"].median,
        compute_ms=spread(each.step_ms for each in alone).median,
        compute_processor_ms=spread(each.processor_ms for each in alone).median,
        loader=times,
        num_workers=patient.train.num_workers,
        num_accumulated=patient.num_accumulated,
        num_processes=patient.placement.devices,
        num_cores=num_cores(),
    )
    return account, facts


def _trials(patient: Patient, still: Measured, facts: Facts, num_rounds: int) -> list[Trial]:
    num_train = patient.manifest.splits["train"].rows
    tried = [
        _try(patient, candidate, still, facts, num_rounds)
        for candidate in candidates(
            patient.train, patient.placement, patient.manifest.task, num_train, facts.num_cores
        )
    ]
    good = [trial for trial in tried if _is_faster(trial)]
    if len(good) > 1:  # gains do not multiply: together they are a trial of their own
        together: dict[str, Any] = {}
        for trial in sorted(good, key=lambda one: one.ratio.median if one.ratio else 1.0):
            together = trial.changes | together
        tried.append(_try(patient, Candidate(together), still, facts, num_rounds))
    return tried


def _try(
    patient: Patient, candidate: Candidate, still: Measured, facts: Facts, num_rounds: int
) -> Trial:
    rows = candidate.changes.get("batch_size", patient.train.batch_size) / patient.train.batch_size
    ratios: list[float] = []
    note = candidate.learns_otherwise
    try:
        with Measured(
            patient.project, f"trial of {candidate.name}", fixed_batch=True, **candidate.changes
        ) as other:
            first = other.time_steps().step_ms / still.time_steps().step_ms / rows
            if first > _HOPELESS:
                ratios, note = [first], "ended after one round"
            else:
                ratios = [
                    other.time_steps().step_ms / still.time_steps().step_ms / rows
                    for _ in range(num_rounds)
                ]
    except TrainingError as error:
        note = str(error)
    ratio = spread(ratios) if ratios else None
    gain = None
    if ratio is not None:
        number = best_num_workers(facts, compute_ratio=ratio.median)
        gain = expected_step_ms(facts, best_num_workers(facts)) / expected_step_ms(
            facts, number, compute_ratio=ratio.median
        )
    return Trial(
        name=candidate.name,
        changes=dict(candidate.changes),
        ratio=ratio,
        note=note,
        learns_otherwise=bool(candidate.learns_otherwise),
        expected_gain=gain,
    )


def _propose(patient: Patient, facts: Facts, tried: list[Trial]) -> Proposal | None:
    """The change of loading and of computing that make the shortest step, together; None where nothing gains."""
    usable = [
        trial
        for trial in tried
        if _is_faster(trial) and (trial.expected_gain or 0) > NOTHING_GAINED
    ]
    best = min(usable, key=lambda trial: trial.ratio.median if trial.ratio else 1.0, default=None)
    ratio = best.ratio.median if best and best.ratio else 1.0
    changes: dict[str, Any] = (
        {f"train.{key}": value for key, value in best.changes.items()} if best else {}
    )
    reasons = [f"{best.name}: a step computes {1 / ratio:.2f} times as fast"] if best else []
    saved = max(0.0, facts.loader.read_ms - facts.loader.copy_ms) if patient.is_jpeg else 0.0
    number = best_num_workers(facts, compute_ratio=ratio)
    step = expected_step_ms(facts, number, compute_ratio=ratio)
    if saved:
        raw_number = best_num_workers(facts, compute_ratio=ratio, saved_ms=saved)
        raw_step = expected_step_ms(facts, raw_number, compute_ratio=ratio, saved_ms=saved)
        if step / raw_step > NOTHING_GAINED:
            number, step = raw_number, raw_step
            changes["precompute.encoding"] = "raw"
            reasons.append(
                f"pixels instead of JPEGs: {saved:.1f} ms less for each batch, for about eight times the disk"
            )
    unchanged = (
        expected_step_ms(facts, facts.num_workers, compute_ratio=ratio)
        if facts.num_workers in facts.loader.batch_ms
        else facts.step_ms
    )
    if number != facts.num_workers and (
        unchanged / step > NOTHING_GAINED or "precompute.encoding" in changes
    ):
        changes["train.num_workers"] = number
        reasons.append(_why_workers(facts, number))
    gain = facts.step_ms / step
    if not changes or gain < NOTHING_GAINED:
        return None
    return Proposal(changes=changes, expected_step_ms=step, expected_gain=gain, reasons=reasons)


def _is_faster(trial: Trial) -> bool:
    """In every round: on a busy machine a median alone is often luck."""
    return trial.ratio is not None and trial.ratio.high < 1 and not trial.learns_otherwise


def _why_workers(facts: Facts, number: int) -> str:
    if number == 0:
        return f"no loader processes: a batch takes {facts.loader.batch_ms[0]:.1f} ms in the trainer, less than being sent one"
    return f"{number} loader process{'es' * (number > 1)}: a batch every {facts.loader.batch_ms[number]:.1f} ms, made while the step computes"


def _notes(patient: Patient, facts: Facts) -> list[str]:
    notes = []
    if patient.placement.accelerator == "cpu":
        notes.append(
            "On the CPU nothing is copied to a device: `copy` is what the trainer does with a batch before its step."
        )
        notes.append(
            "Forward and backward of the CPU include waiting for cores that other work uses."
        )
    else:
        notes.append(
            "Parts are from rounds that wait for the device at each; the whole step is from rounds that do not."
        )
    if patient.placement.zero_stage is not None and patient.placement.world_size > 1:
        notes.append(
            "Communication is the time inside DeepSpeed's collectives, one at a time: what overlaps in a real step is not told apart."
        )
    if facts.num_workers and facts.num_processes:
        notes.append("Processor time of loader processes is not in the account of the trainer's.")
    return notes


def _busy(queued_share: float) -> list[str]:
    if queued_share < _BUSY:
        return []
    return [
        f"The machine is busy: threads of the trainer stood in line for a core for {queued_share:.0%} of a step (of all threads together). "
        "Read ratios, not milliseconds, or measure again when it is quiet."
    ]


def _main(params: Params, arguments: argparse.Namespace) -> None:
    project = Project(
        params, Path("data/packed"), Path("data/augmented"), Path(), Path(".work/doctor")
    )
    diagnosis = examine(project, trials=not arguments.no_trials)
    if (arguments.prove or arguments.apply) and diagnosis.proposal:
        diagnosis = diagnosis.model_copy(update={"proof": prove(project, diagnosis.proposal)})
    report = diagnosis.model_dump(mode="json")
    files.write_json(REPORT, report)
    files.write_text(PAGE, doctor_page(report))
    print(doctor_text(report))
    print(f"\nwritten to {REPORT} and {PAGE}")
    if arguments.apply and diagnosis.proposal and diagnosis.proof:
        _apply(diagnosis.proposal, diagnosis.proof.measured_gain)


def _apply(proposal: Proposal, gain: Spread) -> None:
    if gain.median < 1:
        raise TrainingError(
            f"not applied: measured, the proposal is {gain.median:.2f} times as fast as the present settings."
        )
    propose(PARAMS, proposal.changes, apply=True)
    print(
        f"{PARAMS} was changed: {', '.join(proposal.changes)}. `dvc repro` trains anew, as these are other settings."
    )


@quiet_when_unread()
def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make doctor", description=__doc__.split("\n")[0] if __doc__ else None
    )
    parser.add_argument(
        "--prove", action="store_true", help="measure the proposal beside the present settings"
    )
    parser.add_argument(
        "--apply", action="store_true", help="prove it, and write it to params.yaml where it gains"
    )
    parser.add_argument(
        "--no-trials",
        action="store_true",
        help="think of loading alone: precision, compile, layout and strategy are not tried",
    )
    return parser.parse_args()


if __name__ == "__main__":
    given = _arguments()
    run_stage(lambda params: _main(params, given))
