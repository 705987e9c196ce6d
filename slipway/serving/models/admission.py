"""Admission control: queues bursts, and refuses requests at once during a lasting overload.

A queue longer than two batches of an efficient size adds waiting time and no throughput. A burst
may fill the queue up to `max_wait_s` of work. Once the demand, refused requests included, exceeds
that, only two batches are admitted until the demand falls. Callers that wait for each answer before
their next request never cause such an overload, whatever their number.

Example: the model processes 100 items per second, `max_wait_s` is 2, and two efficient batches are
16 items. Up to 200 items may queue. The next one begins an overload: it is refused (`enter`), and
so are queued requests beyond the first 16 items (`shed`). From then on, the queue holds 16 items.
Refused items stay part of the demand, which falls by 100 per second. The overload ends when the
demand is at most 100, half of 200, for example after a second without requests.

Amounts are items (images or rows), times are seconds. The speed is measured on the requests.
"""

import math
from collections.abc import Callable
from time import perf_counter

from slipway.serving.http.responses import Refusal

# An efficient batch has this fraction of the throughput of the largest one.
EFFICIENT = 0.95
MIN_ITEMS = 8  # items that are always admitted: with fewer, the model would wait for the event loop
DECAY = 0.98  # factor of the weights of earlier batches: about the last 50 decide
# Batches of one item before the speed is known. The first ones of a process are slow, and single
# items do not show the gain of larger batches.
FEW_BATCHES = 8
WINDOW_S = 0.25  # length of a window that measures the speed of requests, decoding included
_NEW_SPEED = 0.3  # weight of one window in the measured speed
_NEW_SIZE = 0.05  # weight of one request in the usual number of items
# Requests of the usual size that are always admitted: one running, one waiting, others decoding.
REQUESTS = 8


class BatchTimes:
    """Estimates the seconds of a batch as `fixed + size * each` from the batches so far.

    `fixed` are the seconds per batch and `each` those per item. If all sizes are about equal, the
    two cannot be separated, and are assumed equal.
    """

    def __init__(self) -> None:
        self._weight = self._size = self._seconds = self._size_size = self._size_seconds = 0.0

    def add(self, size: int, seconds: float) -> None:
        self._weight = self._weight * DECAY + 1
        self._size = self._size * DECAY + size
        self._seconds = self._seconds * DECAY + seconds
        self._size_size = self._size_size * DECAY + size * size
        self._size_seconds = self._size_seconds * DECAY + size * seconds

    def fitted(self) -> tuple[float, float]:
        """Return (fixed, each) in seconds, both at least 0. Both are 0 before the first batch."""
        if not self._weight:
            return 0.0, 0.0
        size, seconds = self._size / self._weight, self._seconds / self._weight
        variance = self._size_size / self._weight - size * size
        covariance = self._size_seconds / self._weight - size * seconds
        assumed = seconds / (1 + size)
        each = min(max((covariance + assumed / 4) / (variance + 0.25), 0.0), seconds / size)
        return seconds - each * size, each

    def throughput(self, size: int) -> float:
        """Return the items per second in batches of `size` items.

        Infinity before the first batch.
        """
        fixed, each = self.fitted()
        return size / (fixed + each * size) if fixed + each else math.inf

    def efficient_size(self, max_batch_size: int) -> int:
        fixed, each = self.fitted()
        wanted = EFFICIENT * self.throughput(max_batch_size)
        if not fixed or wanted * each >= 1:
            return 1
        return min(max_batch_size, math.ceil(wanted * fixed / (1 - wanted * each)))


class Place:
    """Context manager that reserves a place in the queue for an admitted request.

    It counts as a request of average size until `set_num_items` is called.
    """

    __slots__ = ("_admission", "num_items")

    def __init__(self, admission: "Admission") -> None:
        self.num_items = admission.enter(None)
        self._admission = admission

    def set_num_items(self, num_items: int) -> None:
        if num_items != self.num_items:
            self._admission.correct_size(num_items - self.num_items)
            self.num_items = num_items

    def __enter__(self) -> "Place":
        return self

    def __exit__(self, *_: object) -> None:
        self._admission.leave(self.num_items)


class Admission:
    """Counts the requests of one worker, and refuses those beyond its capacity.

    Call its methods on the worker's event loop.
    """

    def __init__(
        self,
        max_requests: int,
        max_wait_s: float,
        num_decoders: int,
        shed: Callable[[int], None],
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """Start without any load. Amounts are per worker.

        When an overload begins, `shed` is called with the number of items that may stay queued.
        """
        self._shed = shed
        self._max_requests = max_requests
        self._max_wait_s = max_wait_s
        self._min_items = max(MIN_ITEMS, 2 * num_decoders)
        self._clock = clock
        self._times = BatchTimes()
        self._batch_speed = math.inf  # items per second of the largest batch, from BatchTimes
        self._num_single = 0  # batches of one item, before the first larger one
        self._speed: float | None = None  # items per second, once measured at the limit
        self._bound = math.inf  # items that can be answered within max_wait_s
        # Requested items, refused ones included, minus those that could have been answered since.
        self._demand = 0.0
        self._demand_at = clock()
        self._num_refused = 0.0  # items refused since the demand last equalled the admitted items
        self.num_requests = self.num_items = 0  # admitted and not answered yet
        self._usual_items = 1.0  # usual items per request
        self._window_began, self._window_items, self._window_least = clock(), 0, 0
        self.max_batch_size = 1
        self.is_overloaded = False

    @property
    def most_items(self) -> int:
        """The most items admitted during an overload; the last admitted request may exceed it."""
        several = min(REQUESTS * self._usual_items, self._bound)
        return max(
            self._min_items, 2 * self._times.efficient_size(self.max_batch_size), math.ceil(several)
        )

    def speed(self) -> float:
        """Return the items per second that the model can process; infinity while unknown."""
        return self._batch_speed if self._speed is None else self._speed

    def enter(self, num_items: int | None = 1) -> int:
        """Admit a request, or raise Refusal. Returns the number of items that it counts as.

        `num_items` is None if the body is not parsed yet: the recent average is then used.
        """
        expected = round(self._usual_items) if num_items is None else num_items
        demand = self.num_items + expected
        if demand <= self._bound and not self._num_refused and not self.is_overloaded:
            self._demand = demand  # the usual case
        elif self._add_demand(expected):
            self._shed(self.most_items)
        self._refuse_if_full(expected)
        self.num_requests += 1
        self.num_items += expected
        return expected

    def require_room(self) -> None:
        """Raise Refusal if a request of average size would be refused now. Admits nothing."""
        if self.is_overloaded and self.num_items >= self.most_items:
            self._add_demand(self._usual_items)
        self._refuse_if_full(self._usual_items)

    def ran(self, size: int, seconds: float) -> None:
        """Record that a batch of `size` items took `seconds`.

        Call it before its requests `leave`.
        """
        self._times.add(size, seconds)
        if self._num_single < FEW_BATCHES:
            self._num_single = self._num_single + 1 if size == 1 else FEW_BATCHES
        if self._num_single == FEW_BATCHES:
            self._batch_speed = self._times.throughput(self.max_batch_size)
        self._window_items += size
        now = self._clock()
        if now - self._window_began >= WINDOW_S:
            self._close_window(now)
        self._bound = self.speed() * self._max_wait_s

    def correct_size(self, more_items: int) -> None:
        """Correct the size of an admitted request by `more_items`, which may be negative."""
        is_new = (
            self.num_items + more_items > self._bound
            and not self.is_overloaded
            and self._add_demand(more_items)
        )
        self.num_items += more_items
        if is_new:
            self._shed(self.most_items)

    def leave(self, num_items: int = 1) -> None:
        """Remove a completed or cancelled request of `num_items` items from the count."""
        self.num_requests -= 1
        self.num_items -= num_items
        self._usual_items += _NEW_SIZE * (num_items - self._usual_items)
        if self.num_items < self._window_least:
            self._window_least = self.num_items

    def is_overloaded_now(self) -> bool:
        """Update the demand to the present time. Returns True during an overload."""
        if self.is_overloaded:
            self._add_demand(0)
        return self.is_overloaded

    def overload(self, num_items: float = 1) -> Refusal:
        """Create the refusal of a request of `num_items` items during an overload."""
        return self._refusal(
            f"the demand exceeds {self.speed():.0f} items per second (SLIPWAY_MAX_WAIT_S)",
            num_items,
        )

    def retry_after(self) -> tuple[str, str]:
        """Return the header `retry-after`: whole seconds until the present demand is processed."""
        speed = self.speed()
        seconds = math.ceil(self._demand / speed) if 0 < speed < math.inf else 1
        return "retry-after", str(max(1, seconds))

    def _refuse_if_full(self, num_items: float) -> None:
        """Raise Refusal of a request of `num_items` items if no request may enter now."""
        if self.num_requests >= self._max_requests:
            raise self._refusal(
                f"{self.num_requests} requests are waiting, the limit (SLIPWAY_MAX_QUEUE)",
                num_items,
            )
        if self.is_overloaded and self.num_items >= self.most_items:
            raise self.overload(num_items)

    def _add_demand(self, num_items: float) -> bool:
        """Add requested items to the demand. Returns True if an overload begins with them."""
        bound = self._bound
        demand = self._demand_so_far(bound) if self._num_refused else self.num_items
        self._demand = demand = min(demand, bound) + num_items
        # Hysteresis: an overload ends at half of the bound.
        if self.is_overloaded:
            self.is_overloaded = demand > bound / 2
            return False
        self.is_overloaded = demand > bound
        return self.is_overloaded

    def _demand_so_far(self, bound: float) -> float:
        """Return the admitted items, and the refused ones that time did not yet suffice for."""
        now, inside = self._clock(), self.num_items
        demand = self._demand - (now - self._demand_at) * self.speed() if bound < math.inf else 0.0
        self._demand_at = now
        if demand <= inside:
            self._num_refused = 0
            return inside
        return min(demand, inside + self._num_refused)

    def _close_window(self, now: float) -> None:
        """End the measurement of the model's speed, in items per second, and begin the next one.

        Called as a batch ends. While the queue is nearly empty, the callers set the pace and not
        the model, so the speed is updated only if that never happened since the last call.
        """
        seconds = now - self._window_began
        if self._window_least >= self._min_items / 4 and seconds < 8 * WINDOW_S:
            measured = self._window_items / seconds
            if self._speed is None:
                self._speed = measured
            else:
                self._speed += _NEW_SPEED * (measured - self._speed)
        self._window_began, self._window_items, self._window_least = now, 0, self.num_items

    def _refusal(self, reason: str, num_items: float) -> Refusal:
        if not self._num_refused:
            self._demand_at = self._clock()
        self._num_refused += num_items
        retry_after = self.retry_after()
        return Refusal(
            "queue_full", f"{reason}; try again in {retry_after[1]} s", headers=(retry_after,)
        )
