"""Who gets in when there is more work than the model can do: bursts wait, a lasting overload is refused at once.

A queue longer than two batches of an efficient size adds waiting and no throughput. So a burst may fill the queue up to `max_wait_s` of
work, but once more than that has been asked for than could be done (refused requests count, too), only those two batches are let in,
until the demand falls. Callers that ask one after the other, however many, never add up to such an overload: each waits for its answer.

All amounts are items (images or rows), all times seconds; how fast the model is, is measured on the requests themselves.
"""

import math
from collections.abc import Callable
from time import perf_counter

from serving.http.responses import Refusal

EFFICIENT = (
    0.95  # of the throughput of the largest batch: the smallest batch that has it is large enough
)
MIN_ITEMS = 8  # are always let in: fewer would leave the model waiting for the event loop
FORGETTING = 0.98  # per batch, so that the last 50 or so decide
FEW_BATCHES = 8  # of one item each: the first ones of a process pay for what is cold, and none tells what company saves
WINDOW_S = 0.25  # over which the speed of the whole way, decoding included, is measured
_NEW_SPEED = 0.3  # weight of one window
_NEW_SIZE = 0.05  # weight of one request in the usual number of items
REQUESTS = 8  # of the usual size are let in: one that runs, one that waits, and those that are read and decoded meanwhile


class BatchTimes:
    """Seconds of a batch as `fixed + size * each`, by least squares that forget.

    While all sizes are about the same the two cannot be told apart; then fixed and each are taken to be equal.
    """

    def __init__(self) -> None:
        self._weight = self._size = self._seconds = self._size_size = self._size_seconds = 0.0

    def add(self, size: int, seconds: float) -> None:
        """Note a batch that ran."""
        self._weight = self._weight * FORGETTING + 1
        self._size = self._size * FORGETTING + size
        self._seconds = self._seconds * FORGETTING + seconds
        self._size_size = self._size_size * FORGETTING + size * size
        self._size_seconds = self._size_seconds * FORGETTING + size * seconds

    def fitted(self) -> tuple[float, float]:
        """(fixed, each), both in seconds and not negative; zeros where no batch has run."""
        if not self._weight:
            return 0.0, 0.0
        size, seconds = self._size / self._weight, self._seconds / self._weight
        variance = self._size_size / self._weight - size * size
        covariance = self._size_seconds / self._weight - size * seconds
        assumed = seconds / (1 + size)
        each = min(max((covariance + assumed / 4) / (variance + 0.25), 0.0), seconds / size)
        return seconds - each * size, each

    def throughput(self, size: int) -> float:
        """Items a second in batches of `size`; infinity where no batch has run."""
        fixed, each = self.fitted()
        return size / (fixed + each * size) if fixed + each else math.inf

    def efficient_size(self, max_batch_size: int) -> int:
        """The smallest batch that is EFFICIENT."""
        fixed, each = self.fitted()
        wanted = EFFICIENT * self.throughput(max_batch_size)
        if not fixed or wanted * each >= 1:
            return 1
        return min(max_batch_size, math.ceil(wanted * fixed / (1 - wanted * each)))


class Place:
    """A request's place inside: it holds as many items as are usual from its entry on, and as many as it has once they are known."""

    __slots__ = ("_admission", "num_items")

    def __init__(self, admission: "Admission") -> None:
        """Refusal if it has to stay outside."""
        self.num_items = admission.enter(None)
        self._admission = admission

    def has(self, num_items: int) -> None:
        """It is known now how many items the request has."""
        if num_items != self.num_items:
            self._admission.grow(num_items - self.num_items)
            self.num_items = num_items

    def __enter__(self) -> "Place":
        return self

    def __exit__(self, *_: object) -> None:
        self._admission.leave(self.num_items)


class Admission:
    """Counts what is inside and refuses what would only wait. One for each worker; used on its event loop alone."""

    def __init__(
        self,
        max_requests: int,
        max_wait_s: float,
        num_decoders: int,
        shed: Callable[[int], None],
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """`shed` is called when an overload begins, with the number of items that may stay: the others would wait too long now."""
        self._shed = shed
        self._max_requests = max_requests
        self._max_wait_s = max_wait_s
        self._min_items = max(MIN_ITEMS, 2 * num_decoders)
        self._clock = clock
        self._times = BatchTimes()
        self._batch_speed = math.inf  # items a second of the largest batches, as the times of batches say, once there are enough
        self._num_alone = 0  # batches of one item, before there was another
        self._speed: float | None = (
            None  # items a second of the whole way, once it has been seen at its limit
        )
        self._bound = math.inf  # items that can be done within max_wait_s
        self._demand = (
            0.0  # items asked for, refused ones included, beyond what could have been done since
        )
        self._demand_at = clock()
        self._num_refused = 0.0  # items, since there was last no demand beyond what is inside
        self._num_requests = self._num_items = 0
        self._usual_items = 1.0  # of a request
        self._window_began, self._window_items, self._window_least = clock(), 0, 0
        self.max_batch_size = 1
        self.is_overloaded = False

    @property
    def num_requests(self) -> int:
        """Requests between their admission and their answer."""
        return self._num_requests

    @property
    def num_items(self) -> int:
        """Their items."""
        return self._num_items

    @property
    def most_items(self) -> int:
        """The items that are let in during an overload; the last request may bring more."""
        several = min(REQUESTS * self._usual_items, self._bound)
        return max(
            self._min_items, 2 * self._times.efficient_size(self.max_batch_size), math.ceil(several)
        )

    def speed(self) -> float:
        """Items a second that can be answered; infinity while nothing is known."""
        return self._batch_speed if self._speed is None else self._speed

    def enter(self, num_items: int | None = 1) -> int:
        """Let a request in with so many items; Refusal if it has to stay outside.

        None: its body has not been parsed. It enters with as many as is usual, which are returned.
        """
        expected = round(self._usual_items) if num_items is None else num_items
        asked = self._num_items + expected
        if (
            asked <= self._bound and not self._num_refused and not self.is_overloaded
        ):  # as nearly always
            self._demand = asked
        elif self._ask(expected):
            self._shed(self.most_items)
        self._require_room(expected)
        self._num_requests += 1
        self._num_items += expected
        return expected

    def require_room(self) -> None:
        """Refusal if a request whose body has not arrived would have to stay outside now. It takes no place: a slow caller holds none."""
        if self.is_overloaded and self._num_items >= self.most_items:
            self._ask(self._usual_items)
        self._require_room(self._usual_items)

    def ran(self, size: int, seconds: float) -> None:
        """Note a batch that the model answered, before its requests leave."""
        self._times.add(size, seconds)
        if self._num_alone < FEW_BATCHES:
            self._num_alone = self._num_alone + 1 if size == 1 else FEW_BATCHES
        if self._num_alone == FEW_BATCHES:
            self._batch_speed = self._times.throughput(self.max_batch_size)
        self._window_items += size
        now = self._clock()
        if now - self._window_began >= WINDOW_S:
            self._close_window(now)
        self._bound = self.speed() * self._max_wait_s

    def grow(self, more_items: int) -> None:
        """A request that was let in has more items than was known."""
        is_new = (
            self._num_items + more_items > self._bound
            and not self.is_overloaded
            and self._ask(more_items)
        )
        self._num_items += more_items
        if is_new:
            self._shed(self.most_items)

    def leave(self, num_items: int = 1) -> None:
        """A request, of so many items as is known by now, is answered, or given up."""
        self._num_requests -= 1
        self._num_items -= num_items
        self._usual_items += _NEW_SIZE * (num_items - self._usual_items)
        if self._num_items < self._window_least:
            self._window_least = self._num_items

    def has_more_than_it_can_do(self) -> bool:
        """Whether there is an overload now, though nobody may have asked since it began."""
        if self.is_overloaded:
            self._ask(0)
        return self.is_overloaded

    def overload(self, num_items: float = 1) -> Refusal:
        """What a request is told that waits outside, or is sent out again."""
        return self._refusal(
            f"more is asked for than can be answered, {self.speed():.0f} a second now (SLIPWAY_MAX_WAIT_S)",
            num_items,
        )

    def retry_after(self) -> tuple[str, str]:
        """The header that says in how many seconds what was asked for is done."""
        speed = self.speed()
        return "retry-after", str(
            max(1, math.ceil(self._demand / speed)) if 0 < speed < math.inf else 1
        )

    def _require_room(self, num_items: float) -> None:
        if self._num_requests >= self._max_requests:
            raise self._refusal(
                f"{self._num_requests} requests are waiting, the limit (SLIPWAY_MAX_QUEUE)",
                num_items,
            )
        if self.is_overloaded and self._num_items >= self.most_items:
            raise self.overload(num_items)

    def _ask(self, num_items: float) -> bool:
        """Count more items that are asked for; True if that makes an overload."""
        bound = self._bound
        demand = self._with_those_outside(bound) if self._num_refused else self._num_items
        self._demand = demand = (demand if demand < bound else bound) + num_items
        # It ends at half of where it began, so that it does not come and go with each request.
        if self.is_overloaded:
            self.is_overloaded = demand > bound / 2
            return False
        self.is_overloaded = demand > bound
        return self.is_overloaded

    def _with_those_outside(self, bound: float) -> float:
        """Items inside, and of those that were refused as many as could not have been done since."""
        now, inside = self._clock(), self._num_items
        demand = self._demand - (now - self._demand_at) * self.speed() if bound < math.inf else 0.0
        self._demand_at = now
        if demand <= inside:
            self._num_refused = 0
            return inside
        return min(demand, inside + self._num_refused)

    def _close_window(self, now: float) -> None:
        """What was answered in a window in which there was always work is what can be done. It begins and ends with the end of a batch."""
        seconds = now - self._window_began
        if self._window_least >= self._min_items / 4 and seconds < 8 * WINDOW_S:
            measured = self._window_items / seconds
            self._speed = (
                measured
                if self._speed is None
                else self._speed + _NEW_SPEED * (measured - self._speed)
            )
        self._window_began, self._window_items, self._window_least = now, 0, self._num_items

    def _refusal(self, reason: str, num_items: float) -> Refusal:
        if not self._num_refused:
            self._demand_at = self._clock()
        self._num_refused += num_items
        retry_after = self.retry_after()
        return Refusal(
            "queue_full", f"{reason}; try again in {retry_after[1]} s", headers=(retry_after,)
        )
