"""Simulates 60 days of traffic under the closed loop, with and without a person who decides.

`python -m bench.loop` runs 20 clean streams and each planted change on two seeds, prints the
tables and writes them. It takes some minutes on one core. The drift windows, the triggers, the next
step, the comparison and the test of API keys are the real code. The clock, the network and the
rollout are simulated: a logistic regression trains in milliseconds, and a canary takes a day.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.conditions import conditions
from bench.loop_traffic import (
    CONTRACT,
    PLANS,
    Float,
    SmallModel,
    StreamPlan,
    classes,
    draw,
    ood_scores,
    seasonal,
)
from slipway.config.loop import LoopParams
from slipway.drift.features import extract
from slipway.drift.verdict import Budget, judge
from slipway.drift.window import Window
from slipway.loop import comparison as comparing
from slipway.loop.journal import Cycle, LoopStep, StepName
from slipway.loop.label_keys import keys_that_stand_out
from slipway.loop.machine import CandidateFacts, LoopFacts, NextStep, next_step
from slipway.loop.steps import DONE
from slipway.loop.triggers import confirmed_drift, moved_further, settled_span
from slipway.metrics.scores import Resampling
from slipway.reports.evaluation.reference_comparison import ReferenceAnswers
from slipway.reports.evaluation.slice_scores import RowAnswers
from slipway.system import files
from slipway.system.cores import num_cores
from slipway.traffic.monitoring_records import JudgedWindow

RESULT = Path("bench/results/loop.md")
# A window has four hours, SLIPWAY_WINDOW_MINUTES=240.
DAYS, WINDOWS, WINDOW_ROWS, LABELLED = 60, 6, 1000, 0.2
BUDGET = Budget(windows_per_day=WINDOWS)
DAY_S = 86400.0
WINDOW_S = DAY_S / WINDOWS
RECENT_DAYS = 14  # API keys are judged by their labels of these last days
KEYS = ("shop-1", "shop-2", "shop-3", "shop-4", "shop-5")
BASE_ROWS, FRESH_ROWS, TEST_FRACTION = 4000, 20_000, 0.15
PARAMS = LoopParams.model_validate(
    {
        "triggers": {"drift": True, "objective": None, "new_labels": None},
        "min_labels": 1000,
        "pause_days": 7.0,
        "start": "scratch",
        "max_forgetting": 0.01,
        "require_gain": True,
        "min_keys": 2,
        "trusted_keys": [],
        "shadow_requests": 500,
        "decision_days": 7.0,
        "approvers": [],
        "webhook": None,
        "canary": {"steps": [0.1, 1.0], "hold_seconds": 60, "hold_requests": 300},
    }
)


@dataclass
class LabelledRows:
    """Labelled rows; test rows are chosen by the rule of `split.assignment: stable`."""

    inputs: Float
    truth: NDArray[np.int64]  # the true class
    label: NDArray[np.int64]  # the class that the caller sent, which may be wrong
    predicted: NDArray[np.int64]
    key: NDArray[np.int64]
    answered: Float  # days
    model: NDArray[np.int64]  # number of the model that answered
    is_test: NDArray[np.bool_]

    def where(self, rows: NDArray[np.bool_]) -> "LabelledRows":
        return LabelledRows(**{name: values[rows] for name, values in vars(self).items()})


@dataclass
class Outcome:
    """Counts of what the loop did on one stream of traffic."""

    trainings: int = 0
    requests: int = 0
    deployments: int = 0
    undecided: int = 0  # deployments without an approval of that version
    outcomes: Counter[str] = field(default_factory=Counter)
    named: set[str] = field(default_factory=set)  # API keys that were found suspicious
    alarms: int = 0  # windows that drifted
    accuracy: float = 0.0  # of the served model on fresh rows of the last day
    oracle: float = 0.0
    unchanged: float = 0.0  # accuracy of the first model on these rows


class SimulatedLoop:
    """One stream with a simulated service, the loop, and a person who decides."""

    def __init__(self, plan: StreamPlan, seed: int) -> None:
        self.plan, self.random, self.end = plan, np.random.default_rng(seed), Outcome()
        self.params = PARAMS.model_copy(update={"require_gain": plan.require_gain})
        inputs, targets = draw(self.random, BASE_ROWS, 0.0)
        if plan.shift is seasonal:  # the training data comes from all seasons
            inputs = np.concatenate(
                [draw(self.random, 8, plan.shift(part / 24))[0] for part in range(BASE_ROWS // 8)]
            )
            targets = classes(self.random, inputs)
        is_test = self.random.random(len(inputs)) < TEST_FRACTION
        self.base = inputs[~is_test], targets[~is_test]
        self.old_test = inputs[is_test], targets[is_test]
        self.models = [SmallModel("m1", *self.base)]
        self.reference = self.models[0].reference(*self.old_test, self.base[0])
        self.parts: list[LabelledRows] = []
        self.windows: list[JudgedWindow] = []
        self.steps: list[LoopStep] = []
        self.candidate: SmallModel | None = None
        self.proposed = self.decided = -1.0  # days
        self.refused: set[str] = set()

    def run(self) -> Outcome:
        """Simulate all days, with one call of the loop at the end of each; return the result."""
        for day in range(DAYS):
            for part in range(WINDOWS):
                self._window(day + part / WINDOWS)
            self._loop(day + 1.0)
        fresh, truth = draw(self.random, FRESH_ROWS, self.plan.shift(DAYS))
        every = self._labels(DAYS)
        train = every.where(~every.is_test)
        oracle = SmallModel(
            "oracle",
            np.concatenate([self.base[0], train.inputs]),
            np.concatenate([self.base[1], train.truth]),
        )
        first, served = self.models[0], self.models[-1]
        self.end.accuracy, self.end.oracle, self.end.unchanged = (
            float((model.answers(fresh).argmax(1) == truth).mean())
            for model in (served, oracle, first)
        )
        return self.end

    def _window(self, day: float) -> None:
        """Answer a window of requests, judge its drift, and store the rows that get a label."""
        inputs, truth = draw(self.random, WINDOW_ROWS, self.plan.shift(day))
        outputs = self.models[-1].answers(inputs)
        window = Window(self.reference)
        window.add(extract(CONTRACT, inputs.astype(np.float32), outputs, ood_scores(inputs)))
        verdict = judge(self.reference, window, BUDGET.level)
        drifted = frozenset(one.name for one in verdict.features if one.drifted)
        self.end.alarms += bool(drifted)
        now = day * DAY_S
        self.windows.append(
            JudgedWindow(
                f"{self.models[-1].version}/fp32",
                now,
                now + WINDOW_S,
                drifted,
                window.to_bytes(),
                WINDOW_S,
            )
        )
        keys = self.random.integers(len(KEYS), size=WINDOW_ROWS)
        is_wrong = (keys == len(KEYS) - 1) & (self.random.random(WINDOW_ROWS) < self.plan.wrong)
        rows = LabelledRows(
            inputs=inputs,
            truth=truth,
            label=np.where(is_wrong, 1 - truth, truth),
            predicted=outputs.argmax(1),
            key=keys,
            answered=np.full(WINDOW_ROWS, day),
            model=np.full(WINDOW_ROWS, len(self.models)),
            is_test=self.random.random(WINDOW_ROWS) < TEST_FRACTION,
        )
        self.parts.append(rows.where(self.random.random(WINDOW_ROWS) < LABELLED))

    def _labels(self, day: float) -> LabelledRows:
        """Return all rows whose label has arrived by `day`."""
        names = vars(self.parts[0])
        every = LabelledRows(
            **{name: np.concatenate([vars(part)[name] for part in self.parts]) for name in names}
        )
        return every.where(every.answered + self.plan.delay_days <= day)

    def _loop(self, day: float) -> None:
        """Take steps until one has to wait, as `slipway loop` does."""
        while True:
            last = self._last()
            step = next_step(last, self._facts(last, day), self.params)
            if step.action == "wait":
                return
            number = last.number if last and last.is_open else (last.number if last else 0) + 1
            detail = self._take(step, last, day)
            self._record(number, DONE[step.action], detail, day)

    def _record(self, cycle: int, what: StepName, detail: dict[str, object], day: float) -> None:
        self.steps.append(
            LoopStep(
                format_version=1,
                number=len(self.steps) + 1,
                cycle=cycle,
                time=day * DAY_S,
                what=what,
                detail=detail,
                previous="",
            )
        )

    def _last(self) -> Cycle | None:
        if not self.steps:
            return None
        number = self.steps[-1].cycle
        return Cycle(number, [step for step in self.steps if step.cycle == number])

    def _facts(self, last: Cycle | None, day: float) -> LoopFacts:
        labels = self._labels(day)
        is_recent = labels.answered >= day - RECENT_DAYS
        own = labels.where((labels.model == len(self.models)) & is_recent)
        own = own.where(~np.isin(own.key, self._numbers_of_refused()))
        found = keys_that_stand_out(
            own.label != own.predicted, [KEYS[key] for key in own.key], own.answered
        )
        self.refused |= {record.key for record in found}
        own = own.where(~np.isin(own.key, self._numbers_of_refused()))
        self.end.named |= self.refused
        is_open = last is not None and last.is_open
        version = self.models[-1].version
        since = last.steps[-1].time if last else 0.0
        drift = None if is_open else self._new_drift(last, labels, since)
        if is_open and last:
            since = last.detail("triggered")["since"]
            if last.has("requested") and not last.has("decided"):
                self._decide(last, day)
                last = self._last()
        num_labels = int((own.answered * DAY_S >= since).sum())
        return LoopFacts(
            now=day * DAY_S,
            reasons=(drift[0],) if drift else (),
            num_labels=num_labels,
            served=version,
            candidate=self._candidate_facts(last, day),
        )

    def _numbers_of_refused(self) -> list[int]:
        return [KEYS.index(key) for key in self.refused]

    def _own_windows(self) -> list[JudgedWindow]:
        version = f"{self.models[-1].version}/fp32"
        return [one for one in self.windows if one.model == version]

    def _drift(self, since: float) -> tuple[str, float] | None:
        return confirmed_drift(self._own_windows(), since)

    def _new_drift(
        self, last: Cycle | None, labels: LabelledRows, since: float
    ) -> tuple[str, float] | None:
        usable = (labels.model == len(self.models)) & ~np.isin(
            labels.key, self._numbers_of_refused()
        )
        answered = labels.answered[usable] * DAY_S

        def num_labels(begin: float, end: float | None) -> int:
            arrived = answered + self.plan.delay_days * DAY_S
            return int(((answered >= begin) & ((end is None) | (arrived <= (end or 0.0)))).sum())

        windows = self._own_windows()
        if span := settled_span(last, self.models[-1].version, num_labels):
            windows = moved_further(windows, lambda model: self.reference, span)
        return confirmed_drift(windows, since)

    def _decide(self, last: Cycle, day: float) -> None:
        """Approve a pending request one day after it was made."""
        requested = next(step.time for step in last.steps if step.what == "requested")
        if self.plan.decides and day * DAY_S >= requested + DAY_S:
            detail: dict[str, object] = {
                "verdict": "approved",
                "by": "person",
                "reason": "simulated",
                "version": last.detail("requested")["version"],
            }
            self._record(last.number, "decided", detail, day)

    def _candidate_facts(self, last: Cycle | None, day: float) -> CandidateFacts:
        if last is None or not last.is_open:
            return CandidateFacts(workers=1)
        if last.has("canary"):
            is_over = day > self.proposed
            if is_over and self.candidate is not None:
                self._deploy(last)
            return CandidateFacts(1, canary="promoted" if is_over else "running", why="simulated")
        if last.has("shadowed"):
            return CandidateFacts(1, shadow="running", shadowed=WINDOW_ROWS)
        return CandidateFacts(workers=1)

    def _deploy(self, last: Cycle) -> None:
        """Serve the candidate, and count it as undecided unless its version was approved."""
        assert self.candidate is not None
        is_approved = last.has("decided") and (
            last.detail("decided")["verdict"],
            last.detail("decided")["version"],
        ) == ("approved", self.candidate.version)
        self.end.deployments += 1
        self.end.undecided += not is_approved
        self.models.append(self.candidate)
        self.reference = self.candidate_reference
        self.candidate = None

    def _take(self, step: NextStep, last: Cycle | None, day: float) -> dict[str, object]:
        if step.action == "trigger":
            drift = self._drift(0.0)
            since = drift[1] if drift else 0.0
            return {"reasons": [step.why], "since": since, "served": self.models[-1].version}
        if step.action == "end":
            self.end.outcomes[str(step.outcome)] += 1
            return {"outcome": step.outcome, "why": step.why}
        assert last is not None
        if step.action == "train":
            return self._train(last, day)
        if step.action == "compare":
            return self._compare(day, last.detail("triggered")["since"])
        if step.action == "request":
            self.end.requests += 1
            assert self.candidate is not None
            expires = day * DAY_S + PARAMS.decision_days * DAY_S
            return {"version": self.candidate.version, "expires": expires}
        if step.action == "canary":
            self.proposed = day
        return {}

    def _collected(self, day: float) -> LabelledRows:
        labels = self._labels(day)
        return labels.where(~np.isin(labels.key, self._numbers_of_refused()))

    def _train(self, last: Cycle, day: float) -> dict[str, object]:
        self.end.trainings += 1
        rows = self._collected(day)
        train, test = rows.where(~rows.is_test), rows.where(rows.is_test)
        inputs = np.concatenate([self.base[0], train.inputs])
        version = f"m{len(self.models) + 1}-{last.number}"
        self.candidate = SmallModel(version, inputs, np.concatenate([self.base[1], train.label]))
        since = last.detail("triggered")["since"]
        train, test = (part.where(part.answered * DAY_S >= since) for part in (train, test))
        self.candidate_reference = self.candidate.reference(test.inputs, test.label, train.inputs)
        return {"version": version}

    def _compare(self, day: float, since: float) -> dict[str, object]:
        assert self.candidate is not None
        rows = self._collected(day)
        recent = rows.where(rows.is_test & (rows.answered * DAY_S >= since))
        inputs = np.concatenate([self.old_test[0], recent.inputs])
        targets = np.concatenate([self.old_test[1], recent.label]).astype(np.float64)
        served = ReferenceAnswers(
            "served",
            self.models[-1].version,
            "cpu",
            self.models[-1].answers(inputs),
            np.zeros(len(inputs), bool),
            None,
            "",
        )
        names = [*[None] * len(self.old_test[1]), *(KEYS[key] for key in recent.key.tolist())]
        found = comparing.compare_models(
            served,
            RowAnswers("table_classification", targets, self.candidate.answers(inputs)),
            names,
            [*[0.0] * len(self.old_test[1]), *recent.answered.tolist()],
            Resampling(7, 300, 0.95),
        )
        self.refused |= {record.key for record in found.contradicted}
        self.end.named |= self.refused
        outcome, why = comparing.judge(found, "passed", self.params)
        return {"outcome": outcome, "why": why}


def run_stream(plan: int, seed: int) -> Outcome:
    """Run one stream of PLANS, or a clean one for -1."""
    return SimulatedLoop(PLANS[plan] if plan >= 0 else StreamPlan("clean"), seed).run()


def _line(name: str, ends: Sequence[Outcome]) -> str:
    outcomes = sum((end.outcomes for end in ends), Counter[str]())
    named = sorted({key for end in ends for key in end.named})
    shown = ", ".join(f"{count} {what}" for what, count in sorted(outcomes.items())) or "none"
    figures = [f"{np.mean([getattr(end, one) for end in ends]):.4f}" for one in _MEANS]
    gap = max(end.oracle - end.accuracy for end in ends)
    cells = [
        name,
        len(ends),
        sum(end.alarms for end in ends),
        sum(end.trainings for end in ends),
        sum(end.requests for end in ends),
        sum(end.deployments for end in ends),
        sum(end.undecided for end in ends),
        *figures,
        f"{100 * gap:+.2f}",
        ", ".join(named) or "none",
        shown,
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


_MEANS = ("unchanged", "accuracy", "oracle")
HEADER = (
    "| stream | streams | drifted windows | trainings | requests | deployments | without decision "
    "| first model | served model | oracle | largest gap, points | keys named | cycles ended |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    num_clean, num_seeds = (int(sys.argv[1]), 1) if len(sys.argv) > 1 else (20, 2)
    lines = []
    print(HEADER, flush=True)
    with ProcessPoolExecutor(num_cores()) as workers:
        clean = list(workers.map(run_stream, [-1] * num_clean, range(num_clean)))
        lines.append(_line("clean", clean))
        print(lines[-1], flush=True)
        for plan in range(len(PLANS)):
            seeds = range(100, 100 + num_seeds)
            lines.append(
                _line(PLANS[plan].name, list(workers.map(run_stream, [plan] * num_seeds, seeds)))
            )
            print(lines[-1], flush=True)
    level = BUDGET.level
    expected = num_clean * DAYS * WINDOWS * level**2
    text = f"""# The closed loop on simulated streams

60 days of traffic each, {WINDOWS} windows of {WINDOW_ROWS} rows a day. {LABELLED:.0%} of the rows \
get a label, from {len(KEYS)} keys. The loop runs once a day; a person approves each request a \
day later, except where the line says that nobody decides. Accuracies are on {FRESH_ROWS:,} fresh \
rows of the last day, means over the streams. The oracle is trained on the base rows and on every \
row that got a label in the 60 days, with the true labels.

{HEADER}
{chr(10).join(lines)}

A window without drift alarms with a probability of at most {level:.2e}. Two in a row in the same \
feature are expected at most {expected:.3f} times in the {num_clean} clean streams together.

{conditions("numpy", "scikit-learn")}
"""
    files.write_text(RESULT, text)


if __name__ == "__main__":
    main()
