"""`slipway profile`: shows where a training step spends its time on this machine.

Measures the training that params.yaml describes on the packed data (the output of `precompute`),
names the bottleneck, and proposes changes of params.yaml with their expected gain. `--prove`
measures the changes in turns with the current settings; `--apply` writes them to params.yaml if
they are faster.
"""

import argparse
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from slipway.artifacts.locations import AUGMENTED, PACKED
from slipway.config.edit import propose
from slipway.config.params import Params
from slipway.config.stage_run import run_stage
from slipway.config.tree_settings import require_gradient_steps
from slipway.kinds.registry import kind_of
from slipway.profiling.candidates import (
    TrialCandidate,
    find_bottleneck,
    propose_settings,
    trial_candidates,
)
from slipway.profiling.forecast import Facts, best_num_workers, expected_step_ms
from slipway.profiling.input_pipeline import profile_input_pipeline
from slipway.profiling.loader_times import LoaderTimes
from slipway.profiling.measured_run import MeasuredRun, ProfiledProject
from slipway.profiling.report import (
    ProfileReport,
    Proof,
    SettingsProposal,
    StepAccount,
    TrialResult,
    Utilisation,
    median_loader,
    spread,
    step_account,
)
from slipway.profiling.step_times import Round
from slipway.profiling.utilisation import flop_of_step, matrix_rates, utilisation
from slipway.reports.pages.profile_page import profile_page, profile_text
from slipway.system import files
from slipway.system.command_line import CommandParser, quiet_when_unread
from slipway.system.cores import cpu_model, num_cores
from slipway.system.errors import ParamsError, TrainingError
from slipway.training.batches.batches import cut_step

NUM_ROUNDS = 5
_BUSY = 0.2  # fraction of a step spent queueing for a core that is reported
_HOPELESS = 2.0  # a trial is ended if its first round is so many times as slow
REPORT = Path("reports/profile.json")
PAGE = Path("reports/profile.html")
PARAMS = Path("params.yaml")


def profile_project(
    project: ProfiledProject, *, trials: bool = True, num_rounds: int = NUM_ROUNDS
) -> ProfileReport:
    """Measure the training, find its bottleneck, and propose faster settings.

    Without `trials`, only settings of data loading are proposed.
    """
    if project.placement.num_nodes > 1:
        raise ParamsError(
            f"train.num_nodes is {project.placement.num_nodes}; the profile measures one node. "
            "Set it to 1 for this."
        )
    with ExitStack() as stack:
        current = stack.enter_context(MeasuredRun(project, "present"))
        fixed = stack.enter_context(MeasuredRun(project, "one batch", fixed_batch=True))
        loader = stack.enter_context(
            MeasuredRun(project, "loader", loader=True, strategy="single", devices=1)
        )
        account, facts, used = _measure(project, current, fixed, loader, num_rounds)
        tried = _run_trials(project, fixed, facts, num_rounds) if trials else []
    parts_ms = {part: value.median for part, value in account.parts_ms.items()}
    has_pixels = kind_of(project.params.data.task).input.has_pixels
    return ProfileReport(
        machine=describe_machine(),
        runs_as=project.runs_as,
        account=account,
        utilisation=used,
        bottleneck=find_bottleneck(parts_ms, facts, is_jpeg=project.is_jpeg),
        loader=facts.loader,
        raw=profile_input_pipeline(project.params, project.root) if has_pixels else None,
        trials=tried,
        proposal=propose_settings(facts, tried, is_jpeg=project.is_jpeg),
        proof=None,
        notes=_notes(project, facts, account),
    )


def prove(
    project: ProfiledProject, proposal: SettingsProposal, num_rounds: int = NUM_ROUNDS
) -> Proof:
    """Measure the proposed and the current settings in turns, over `num_rounds` rounds."""
    train = {
        key.removeprefix("train."): value
        for key, value in proposal.changes.items()
        if key.startswith("train.")
    }
    proposed = project
    if proposal.changes.get("precompute.encoding") == "raw":
        proposed = project.with_raw_pixels()
    with MeasuredRun(project, "before") as before, MeasuredRun(proposed, "after", **train) as after:
        before.time_steps()  # warm-up
        after.time_steps()
        pairs = [(before.time_steps(), after.time_steps()) for _ in range(num_rounds)]
    return Proof(
        account=step_account([new for _, new in pairs], project.params.train.batch_size),
        expected_gain=proposal.expected_gain,
        measured_gain=spread(old.step_ms / new.step_ms for old, new in pairs),
    )


def describe_machine() -> str:
    """Return the cores, GPUs, software versions and load of this machine."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    devices = f"{num_cores()} cores of {cpu_model()}, {', '.join(gpus) or 'no GPU'}"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{devices}; {versions}; load average {os.getloadavg()[0]:.1f}"


def _measure(
    project: ProfiledProject,
    current: MeasuredRun,
    fixed: MeasuredRun,
    loader: MeasuredRun,
    num_rounds: int,
) -> tuple[StepAccount, Facts, Utilisation | None]:
    """Time three runs in turns over `num_rounds` rounds, after one warm-up round of each.

    `current` is the training itself, `fixed` trains on one repeated batch, and `loader` only loads.
    """
    placement, train = project.placement, project.params.train
    has_peers = placement.world_size > 1
    synchronises = placement.accelerator == "gpu" or has_peers
    current.time_steps()
    fixed.time_steps()
    loader.time_loader()
    rounds: dict[str, list[Round]] = {"plain": [], "synchronised": [], "silent": [], "fixed": []}
    loads: list[LoaderTimes] = []
    rates: list[dict[str, float]] = []
    for _ in range(num_rounds):
        rounds["plain"].append(current.time_steps())
        rates.append(matrix_rates(placement))
        if synchronises:
            rounds["synchronised"].append(current.time_steps(synchronised=True))
        if has_peers and placement.strategy == "ddp":
            silent = current.time_steps(synchronised=True, communicates=False)
            rounds["silent"].append(silent)
        rounds["fixed"].append(fixed.time_steps())
        loads.append(loader.time_loader())
    account = step_account(
        rounds["plain"], train.batch_size, rounds["synchronised"], rounds["silent"]
    )
    shape = cut_step(train.batch_size, placement.num_readers, train.max_batch_per_device)
    facts = Facts(
        step_ms=account.step_ms.median,
        data_ms=account.parts_ms["data"].median,
        compute_ms=spread(each.step_ms for each in rounds["fixed"]).median,
        compute_processor_ms=spread(each.processor_ms for each in rounds["fixed"]).median,
        loader=median_loader(loads),
        num_workers=train.num_workers,
        num_accumulated=shape.num_accumulated,
        num_processes=placement.devices,
        num_cores=num_cores(),
    )
    used = None
    if not train.freeze_epochs and (flop := flop_of_step(project, rounds["plain"])):
        used = utilisation(placement, flop, rounds["plain"], rates)
    return account, facts, used


def _run_trials(
    project: ProfiledProject, fixed: MeasuredRun, facts: Facts, num_rounds: int
) -> list[TrialResult]:
    candidates = trial_candidates(
        project.params.train,
        project.placement,
        project.manifest.task,
        project.manifest.splits["train"].rows,
        facts.num_cores,
    )
    tried = [_try(project, candidate, fixed, facts, num_rounds) for candidate in candidates]
    faster = [trial for trial in tried if trial.is_faster]
    if len(faster) > 1:  # gains do not multiply, so the combination is a trial of its own
        combined: Mapping[str, Any] = {}
        for trial in sorted(faster, key=lambda trial: trial.median_ratio):
            combined = trial.changes | dict(combined)
        tried.append(_try(project, TrialCandidate(combined), fixed, facts, num_rounds))
    return tried


def _try(
    project: ProfiledProject,
    candidate: TrialCandidate,
    fixed: MeasuredRun,
    facts: Facts,
    num_rounds: int,
) -> TrialResult:
    batch_size = project.params.train.batch_size
    relative_rows = candidate.changes.get("batch_size", batch_size) / batch_size
    name, ratio, gain, note = f"trial of {candidate.name}", None, 0.0, candidate.learns_otherwise
    try:
        with MeasuredRun(project, name, fixed_batch=True, **candidate.changes) as trial:
            ratios = []
            for _ in range(num_rounds + 1):
                step_ms = trial.time_steps().step_ms
                ratios.append(step_ms / fixed.time_steps().step_ms / relative_rows)
                if ratios[0] > _HOPELESS:
                    note = "ended after one round"
                    break
        ratio = spread(ratios[1:] or ratios)  # the first round is a warm-up
        workers = best_num_workers(facts, compute_ratio=ratio.median)
        expected_ms = expected_step_ms(facts, workers, compute_ratio=ratio.median)
        gain = expected_step_ms(facts, best_num_workers(facts)) / expected_ms
    except TrainingError as error:
        note = str(error)
    return TrialResult(
        name=candidate.name,
        changes=dict(candidate.changes),
        ratio=ratio,
        note=note,
        learns_otherwise=bool(candidate.learns_otherwise),
        expected_gain=gain,
    )


def _notes(project: ProfiledProject, facts: Facts, account: StepAccount) -> list[str]:
    placement = project.placement
    notes = []
    if placement.accelerator == "cpu":
        notes += [
            "On the CPU nothing is copied to a device: `copy` is what the trainer does with a "
            "batch before its step.",
            "Forward and backward on the CPU include waiting for cores that other work uses.",
        ]
    else:
        notes.append(
            "Parts are from rounds that wait for the device after each; the whole step is from "
            "rounds that do not."
        )
    if placement.zero_stage is not None and placement.world_size > 1:
        notes.append(
            "Communication is the time inside DeepSpeed's collectives, one at a time; overlap in a "
            "real step is not separated."
        )
    if project.params.train.freeze_epochs:
        notes.append(
            "A step's operations are not counted: train.freeze_epochs trains other parts of the "
            "network in other epochs."
        )
    if facts.num_workers:
        notes.append("Processor time of loader processes is not included in the trainer's.")
    if account.queued_fraction >= _BUSY:
        notes.append(
            "The machine is busy: threads of the trainer queued for a core for "
            f"{account.queued_fraction:.0%} of a step, summed over threads. Read ratios, not "
            "milliseconds, or measure again when it is quiet."
        )
    return notes


def _profile(params: Params, arguments: argparse.Namespace) -> None:
    require_gradient_steps(params.train.network, "slipway profile")
    project = ProfiledProject(params, PACKED, AUGMENTED, Path(), Path(".work/profile"))
    found = profile_project(project, trials=not arguments.no_trials)
    if (arguments.prove or arguments.apply) and found.proposal:
        found = found.model_copy(update={"proof": prove(project, found.proposal)})
    report = found.model_dump(mode="json")
    files.write_json(REPORT, report)
    files.write_text(PAGE, profile_page(report))
    print(profile_text(report))
    print(f"\nwritten to {REPORT} and {PAGE}")
    if arguments.apply and found.proposal and found.proof:
        _apply(found.proposal, found.proof.measured_gain.median)


def _apply(proposal: SettingsProposal, gain: float) -> None:
    if gain < 1:
        raise TrainingError(
            f"not applied: the proposal measured {gain:.2f} times as fast as the current settings."
        )
    propose(PARAMS, proposal.changes, apply=True)
    print(
        f"changed {PARAMS}: {', '.join(proposal.changes)}. `slipway run` trains from the start, "
        "because the settings differ."
    )


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="slipway profile",
        description="Measure where the time of a training step goes, and propose faster settings.",
    )
    parser.add_argument(
        "--prove", action="store_true", help="measure the proposal against the current settings"
    )
    parser.add_argument(
        "--apply", action="store_true", help="prove it, and write it to params.yaml if it gains"
    )
    parser.add_argument(
        "--no-trials",
        action="store_true",
        help="propose only settings of the loader; skip precision, compile, layout and strategy",
    )
    return parser


@quiet_when_unread()
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command `slipway profile`."""
    given = _parser().parse_args(arguments)
    run_stage(lambda params: _profile(params, given))


if __name__ == "__main__":
    main()
