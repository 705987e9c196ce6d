"""Turns the schedule's next decision into a job, with proposed values for a new trial."""

from slipway.planning.search_space import Space
from slipway.search.journal import JobLine
from slipway.search.proposals import propose
from slipway.search.schedule import END, WAIT, NewTrial, Promotion, Schedule


def next_job(schedule: Schedule, space: Space) -> JobLine | None:
    """Return the next job, for the caller to add to the schedule; None if there is none now."""
    while True:
        decision = schedule.next()
        if decision in (WAIT, END):
            return None
        if isinstance(decision, Promotion):
            values = next(job.values for job in schedule.jobs if job.trial == decision.trial)
            trial, level = decision.trial, decision.level
        else:
            assert isinstance(decision, NewTrial)
            trial, level = schedule.num_trials, 0
            found = propose(space, schedule.params, trial, decision.outcomes)
            if found is None:
                schedule.is_exhausted = True
                continue
            values = found
        is_last = level == len(schedule.rungs) - 1
        epochs = int(values.get("train.epochs", schedule.epochs))
        return JobLine(
            event="job",
            job=len(schedule.jobs),
            trial=trial,
            values=values,
            level=level,
            epoch=epochs if is_last else schedule.rungs[level],
        )
