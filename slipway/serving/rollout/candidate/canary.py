"""Routes a fraction of one worker's live requests to the candidate model of a canary.

The request id decides which model predicts: the draw is a pure function of the id, so all workers
agree. If the candidate fails a request, the stable model predicts for it; the caller only waits a
little longer. The outcome of each request is evidence for or against the candidate. Callers cannot
bias the evidence: the draw is salted with a secret, an id counts only once, and a request that the
stable model fails as well does not count against the candidate.
"""

import hashlib
import logging
import mmap
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from slipway.serving.http.responses import Refusal
from slipway.serving.models.live_model import LiveModel
from slipway.serving.rollout.evidence import Evidence
from slipway.system import files

logger = logging.getLogger("bentoml.slipway")

_NUM_BITS = 1 << 23
_NOT_ASKED = ("queue_full", "not_ready")  # refused before any model was asked
_MODEL_FAULTS = ("model_failed", "invalid_answer")
AskOne = Callable[[LiveModel], Awaitable[dict[str, Any]]]


def is_chosen(request_id: str, fraction: float, salt: str) -> bool:
    """Return True if the request id belongs to the candidate's `fraction` (0 to 1) of the requests.

    The result depends only on the arguments. A larger fraction only adds ids. `salt` is the
    candidate's secret: each candidate gets other ids, so no caller is always the first to try a new
    model.
    """
    drawn = int.from_bytes(hashlib.sha256(f"{salt}:{request_id}".encode()).digest()[:8])
    return drawn < fraction * 2**64


class SeenIds:
    """Request ids that a canary has seen, over all workers: one bit per hash, in a shared file.

    Only the first request with an id is evidence: its response reveals the model that the id
    selects, and a repeated request is not another draw. A hash collision counts as seen: after
    millions of requests that loses some evidence, and favours no model. If `path` cannot be
    written, each worker knows only its own ids.
    """

    def __init__(self, path: Path, salt: str) -> None:
        self._salt = salt
        try:
            self._bits = _map_shared(path)
        except OSError as error:
            logger.warning(
                "cannot share the request ids of the canary between workers: %s; "
                "a repeated id is recognised only within each worker",
                error,
            )
            self._bits = mmap.mmap(-1, _NUM_BITS // 8)

    def add(self, request_id: str) -> bool:
        """Add a request id. Returns True if no worker has seen it before."""
        digest = hashlib.sha256(f"{self._salt}:used:{request_id}".encode()).digest()
        place, bit = divmod(int.from_bytes(digest[:8]) % _NUM_BITS, 8)
        byte = self._bits[place]
        if byte >> bit & 1:
            return False
        # Two workers that write the same byte at the same moment may lose one of two bits.
        self._bits[place] = byte | 1 << bit
        return True


def _map_shared(path: Path) -> mmap.mmap:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(descriptor, _NUM_BITS // 8)
        files.claim_space(path)
        return mmap.mmap(descriptor, _NUM_BITS // 8)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


class _RoutedRequest(NamedTuple):
    """A request, with the canary's fraction and latency limit when its model was drawn."""

    is_evidence: bool
    fraction: float
    slow_s: float | None
    started: float

    @property
    def seconds(self) -> float:
        """Seconds since the model for this request was drawn."""
        return perf_counter() - self.started


class Canary:
    """Routes the candidate's fraction of the requests to it, and counts the outcomes.

    Requests that take longer than `slow_s` seconds count as slow; None sets no limit.
    """

    def __init__(self, live: LiveModel, evidence: Evidence, salt: str, seen_ids: SeenIds) -> None:
        self.live = live
        self.fraction = 0.0
        self.slow_s: float | None = None
        self._evidence = evidence
        self._salt = salt
        self._seen_ids = seen_ids

    def is_chosen(self, request_id: str) -> bool:
        """Return True if the candidate is drawn to answer this request."""
        return is_chosen(request_id, self.fraction, self._salt)

    async def predict(
        self, request_id: str, stable: Callable[[], LiveModel], predict_with: AskOne
    ) -> dict[str, Any]:
        """Return the prediction of the candidate or of the stable model, as the draw decides.

        `stable` returns the current stable model.
        """
        request = _RoutedRequest(
            self._seen_ids.add(request_id), self.fraction, self.slow_s, perf_counter()
        )
        if self.is_chosen(request_id):
            return await self._by_candidate(request, stable, predict_with)
        return await self._by_stable(request, stable(), predict_with)

    async def explain(
        self, request_id: str, stable: Callable[[], LiveModel], explain_with: AskOne
    ) -> dict[str, Any]:
        """Return the explanation by the model that the draw selects. Its outcome is not counted."""
        self._seen_ids.add(request_id)  # from now on its caller knows which model answers it
        if self.is_chosen(request_id):
            try:
                return await explain_with(self.live)
            except Refusal as refusal:
                if refusal.code not in _MODEL_FAULTS:
                    raise
        return await explain_with(stable())

    async def _by_stable(
        self, request: _RoutedRequest, live: LiveModel, predict_with: AskOne
    ) -> dict[str, Any]:
        is_counted, failed = True, True
        try:
            answer = await predict_with(live)
            failed = False
            return answer
        except Refusal as refusal:
            is_counted = _is_model_fault(refusal)
            raise
        finally:
            if is_counted:
                self._count(request, request.seconds, of_candidate=False, failed=failed)

    async def _by_candidate(
        self, request: _RoutedRequest, stable: Callable[[], LiveModel], predict_with: AskOne
    ) -> dict[str, Any]:
        try:
            answer = await predict_with(self.live)
        except Refusal as refusal:
            if refusal.code in _NOT_ASKED:
                raise
            return await self._after_failure(refusal, request, stable, predict_with)
        except BaseException:  # the caller's time is over, which happens to both models alike
            self._count(request, request.seconds, of_candidate=True, failed=True)
            raise
        self._count(request, request.seconds, of_candidate=True, failed=False)
        return answer

    async def _after_failure(
        self,
        failure: Refusal,
        request: _RoutedRequest,
        stable: Callable[[], LiveModel],
        predict_with: AskOne,
    ) -> dict[str, Any]:
        """Predict with the stable model, and count the candidate's failure if that succeeds."""
        seconds = request.seconds
        is_counted = failed = _is_model_fault(failure)
        try:
            answer = await predict_with(stable())
        except Refusal:  # if neither model answers, the request may be at fault
            failed = False
            raise
        else:
            is_counted = failed = True
            if failure.code == "invalid_answer":
                self._evidence.fault(f"it gave an invalid answer: {failure.message}")
            return answer
        finally:
            if is_counted:
                self._count(request, seconds, of_candidate=True, failed=failed)

    def _count(
        self, request: _RoutedRequest, seconds: float, *, of_candidate: bool, failed: bool
    ) -> None:
        if not request.is_evidence:
            return
        self._evidence.request(of_candidate=of_candidate, seconds=seconds)
        if failed:
            self._evidence.event("errors", request.fraction, of_candidate=of_candidate)
        if request.slow_s is not None and seconds > request.slow_s:
            self._evidence.event("slow", request.fraction, of_candidate=of_candidate)


def _is_model_fault(refusal: Refusal) -> bool:
    """Return True if the model caused the failure, and not the caller.

    A failure of the user's transform counts as one of the model that it belongs to, even if its
    status blames the caller.
    """
    is_error = refusal.status >= 500 and refusal.code not in _NOT_ASKED
    return is_error or refusal.code == "transform_failed"
