"""Admission control, with a simulated clock, worker and callers."""

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from slipway.serving.http.responses import Refusal
from slipway.serving.models.admission import MIN_ITEMS, Admission, BatchTimes

MAX_BATCH_SIZE = 16
FIXED, EACH = (
    0.001,
    0.004,
)  # seconds of the simulated batch: 246 items a second at most in batches of 16


@pytest.mark.parametrize(
    ("fixed", "each"), [(0.005, 0.0001), (0.001, 0.004), (0.0, 0.002), (0.003, 0.0)]
)
def test_batch_times_are_fitted_from_batches_of_different_sizes(fixed: float, each: float) -> None:
    times, draw = BatchTimes(), random.Random(0)
    for _ in range(200):
        size = draw.randint(1, 16)
        times.add(size, (fixed + size * each) * draw.uniform(0.98, 1.02))
    assert times.fitted() == pytest.approx((fixed, each), rel=0.1, abs=2e-4)
    assert times.throughput(16) == pytest.approx(16 / (fixed + 16 * each), rel=0.05)


def test_batch_times_adapt_when_the_machine_becomes_slower() -> None:
    times, draw = BatchTimes(), random.Random(0)
    for slower in (1, 3):
        for _ in range(300):
            size = draw.randint(1, 16)
            times.add(size, slower * (FIXED + size * EACH))
        assert times.throughput(16) == pytest.approx(16 / (FIXED + 16 * EACH) / slower, rel=0.05)


def test_the_efficient_batch_is_small_unless_batching_raises_throughput() -> None:
    for fixed, each, least, most in [
        (0.0, 0.002, 1, 1),
        (0.0005, 0.002, 3, 6),
        (0.01, 0.0001, 14, 16),
    ]:
        times = BatchTimes()
        for size in [1, 2, 4, 8, 16] * 20:
            times.add(size, fixed + size * each)
        assert least <= times.efficient_size(16) <= most


@dataclass
class Simulated:
    """A simulated worker with a greedy batcher on a fake clock."""

    max_wait_s: float = 1.0
    max_requests: int = 256
    each: float = EACH
    now: float = 0.0
    waiting: list[tuple[float, int]] = field(default_factory=list)
    running: list[tuple[float, int]] = field(default_factory=list)
    ends: float = 0.0
    answered: list[tuple[float, float]] = field(default_factory=list)  # asked, waited
    refused: list[float] = field(default_factory=list)
    retry_after: list[int] = field(default_factory=list)
    codes: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.admission = Admission(
            self.max_requests, self.max_wait_s, 2, self.shed, lambda: self.now
        )
        self.admission.max_batch_size = MAX_BATCH_SIZE

    def ask(self, caller: int = 0) -> bool:
        """Send one request now; return True if it is admitted."""
        try:
            self.admission.enter()
        except Refusal as refusal:
            self.codes.add(refusal.code)
            self.refused.append(self.now)
            self.retry_after.append(int(dict(refusal.headers)["retry-after"]))
            return False
        self.waiting.append((self.now, caller))
        self._begin()
        return True

    def shed(self, num_kept: int) -> None:
        """Drop the newest waiting requests, as the batcher does."""
        while len(self.waiting) > num_kept:
            asked, _ = self.waiting.pop()
            self.admission.leave(1)
            self.admission.overload()
            self.refused.append(asked)

    def advance(self, until: float) -> Iterator[int]:
        """Run until the time `until`, and yield the callers whose requests complete."""
        while self.running and self.ends <= until:
            self.now = self.ends
            batch, self.running = self.running, []
            self.admission.ran(len(batch), self.now - self.began)
            for asked, caller in batch:
                self.answered.append((asked, self.now - asked))
                self.admission.leave(1)
                yield caller
            self._begin()
        self.now = until

    def _begin(self) -> None:
        if not self.running and self.waiting:
            self.running, self.waiting = (
                self.waiting[:MAX_BATCH_SIZE],
                self.waiting[MAX_BATCH_SIZE:],
            )
            self.began = self.now
            self.ends = self.now + FIXED + self.each * len(self.running)


PEAK = MAX_BATCH_SIZE / (FIXED + MAX_BATCH_SIZE * EACH)


def open_loop(worker: Simulated, rate: float, seconds: float, seed: int = 0) -> None:
    """Simulate callers of an open loop, which do not wait for responses."""
    draw, at, end = random.Random(seed), worker.now, worker.now + seconds
    while (at := at + draw.expovariate(rate)) < end:
        list(worker.advance(at))
        worker.ask()
    list(worker.advance(end))


def closed_loop(worker: Simulated, num_callers: int, seconds: float) -> None:
    """Simulate callers that repeat after a response, or a second after a refusal."""
    events = [(worker.now, caller) for caller in range(num_callers)]
    end = worker.now + seconds
    while worker.now < end:
        soon = min(events[0][0] if events else end, worker.ends if worker.running else end, end)
        for caller in worker.advance(soon):
            heapq.heappush(events, (worker.now, caller))
        while events and events[0][0] <= worker.now:
            _, caller = heapq.heappop(events)
            if not worker.ask(caller):
                heapq.heappush(events, (worker.now + 1, caller))


def waited(worker: Simulated, since: float = 0.0, share: float = 0.99) -> float:
    """Return the quantile `share` of the seconds that requests sent after `since` waited."""
    waits = sorted(wait for asked, wait in worker.answered if asked >= since)
    return waits[int(len(waits) * share)]


def test_admission_keeps_throughput_high_and_waits_short_in_a_fourfold_overload() -> None:
    normal, overloaded = Simulated(), Simulated()
    open_loop(normal, 0.8 * PEAK, 30)
    assert not normal.refused
    open_loop(overloaded, 4 * PEAK, 30)
    assert len(overloaded.answered) > 0.95 * 30 * PEAK
    assert waited(overloaded) < 2 * waited(normal)
    assert overloaded.codes == {"queue_full"}
    assert all(1 <= seconds <= 3 for seconds in overloaded.retry_after)


def test_without_admission_control_the_same_overload_waits_many_times_longer() -> None:
    """Control: only the number of requests is limited."""
    normal, overloaded = Simulated(), Simulated(max_wait_s=1000.0)
    open_loop(normal, 0.8 * PEAK, 30)
    open_loop(overloaded, 4 * PEAK, 30)
    assert waited(overloaded) > 5 * waited(normal)


def test_admission_stops_refusing_soon_after_an_overload() -> None:
    worker = Simulated()
    open_loop(worker, 4 * PEAK, 10)
    open_loop(worker, 0.8 * PEAK, 20)
    assert max(worker.refused) < 15
    assert waited(worker, since=15) < 0.2


def test_an_overload_ends_even_if_no_more_requests_arrive() -> None:
    worker = Simulated()
    open_loop(worker, 4 * PEAK, 10)
    assert worker.admission.is_overloaded_now()
    list(worker.advance(worker.now + 20))
    assert worker.admission.is_overloaded  # as of when it was last asked
    assert not worker.admission.is_overloaded_now()


def test_admission_admits_a_whole_burst_within_the_maximum_wait() -> None:
    worker = Simulated()
    open_loop(worker, 0.5 * PEAK, 5)
    for _ in range(int(0.8 * PEAK)):
        worker.ask()
    list(worker.advance(10))
    assert not worker.refused
    assert 0.5 < waited(worker, since=5) < 1.1


def test_admission_refuses_a_burst_above_capacity_and_keeps_waits_short() -> None:
    worker = Simulated(max_requests=10_000)
    open_loop(worker, 0.5 * PEAK, 5)
    for _ in range(int(3 * PEAK)):
        worker.ask()
    list(worker.advance(10))
    assert worker.refused
    assert waited(worker, since=5, share=0.999) < 1.1


@pytest.mark.parametrize("num_callers", [1, 8, 32, 100, 200])
def test_admission_never_refuses_callers_in_a_closed_loop(num_callers: int) -> None:
    worker = Simulated()
    closed_loop(worker, num_callers, 10)
    assert not worker.refused
    assert len(worker.answered) > (100 if num_callers == 1 else 0.9 * PEAK) * 10


@pytest.mark.parametrize("rows_per_second", [20, 40, 60, 100])
def test_admission_never_refuses_closed_loop_callers_of_a_slow_model(rows_per_second: int) -> None:
    """After a pause the first runs alone; the others form one batch, longer than the window."""
    worker = Simulated(each=1 / rows_per_second, max_wait_s=2.0)
    worker.now = 100.0
    closed_loop(worker, 32, 60)
    assert not worker.refused
    assert 0.8 * rows_per_second < worker.admission.speed() < 1.2 * rows_per_second


@pytest.mark.parametrize("num_first", [1, 3])
def test_slow_first_requests_of_a_process_do_not_determine_the_measured_speed(
    num_first: int,
) -> None:
    worker = Simulated(each=0.1)  # while another worker warms up on the same cores
    for _ in range(num_first):
        worker.ask()
        list(worker.advance(worker.now + 1))
    worker.each = EACH
    closed_loop(worker, 32, 5)
    assert not worker.refused
    assert worker.admission.speed() == pytest.approx(PEAK, rel=0.1)


@pytest.mark.parametrize("are_at_once", [True, False])
def test_admission_measures_the_speed_of_a_slow_model(are_at_once: bool) -> None:
    """Measured from one batch of many requests, or from several of one."""
    worker = Simulated(each=0.1)
    for _ in range(32 if are_at_once else 8):
        worker.ask()
        if not are_at_once:
            list(worker.advance(worker.now + 1))
    list(worker.advance(worker.now + 30))
    assert not worker.refused
    for _ in range(32):
        worker.ask()
    assert worker.refused


def test_an_overload_of_a_slow_model_is_detected() -> None:
    worker = Simulated(each=1 / 20)
    open_loop(worker, 60, 60)
    assert len(worker.answered) > 0.9 * 20 * 60
    assert waited(worker, since=5) < 5
    assert 0.8 * 20 < worker.admission.speed() < 1.2 * 20


def test_admission_limits_the_number_of_requests_at_any_speed() -> None:
    worker = Simulated(max_requests=5)
    assert [worker.ask() for _ in range(7)] == [True] * 5 + [False] * 2
    list(worker.advance(1))
    assert worker.ask()


def test_admission_counts_rows_not_requests() -> None:
    worker = Simulated()
    closed_loop(worker, 32, 5)
    list(worker.advance(6))
    worker.admission.enter()
    worker.admission.correct_size(999)  # four seconds of work
    assert not worker.ask()
    worker.admission.leave(1000)
    assert worker.admission.num_items == 0


def test_requests_admitted_during_an_overload_keep_model_and_decoders_busy() -> None:
    assert Simulated().admission.most_items == MIN_ITEMS
    assert Admission(256, 1.0, 64, lambda num_kept: None).most_items == 128
