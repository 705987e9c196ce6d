"""A canary in one worker: a share of the live requests goes to the candidate, drawn by the request's id, so that all workers agree.

A request that the candidate fails is answered by the stable model: callers of a bad candidate wait a little longer, and lose nothing.
What came of each request is evidence for the decision, as far as no caller can bring it about: the draw is salted with a secret, an id
counts the first time only, and a request that the stable model does not answer either says nothing against the candidate.
"""

import hashlib
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any, NamedTuple

from serving.http.responses import Refusal
from serving.models.live_model import LiveModel
from serving.rollout.evidence import Evidence
from serving.rollout.first_uses import FirstUses

_NOT_THE_MODELS = ("queue_full", "not_ready")  # refused before any model was asked
_THE_MODELS = ("model_failed", "invalid_answer")
AskOne = Callable[[LiveModel], Awaitable[dict[str, Any]]]


def is_chosen(request_id: str, share: float, salt: str) -> bool:
    """Whether a request belongs to the share of the candidate whose rollout has that salt, which no caller knows.

    A pure function; a larger share only adds requests. No id is always the first to try what is new.
    """
    drawn = int.from_bytes(hashlib.sha256(f"{salt}:{request_id}".encode()).digest()[:8])
    return drawn < share * 2**64


class _RoutedRequest(NamedTuple):
    """A request, as it was when it was drawn."""

    is_evidence: bool
    share: float
    slow_s: float | None
    started: float

    @property
    def seconds(self) -> float:
        """Since it was drawn."""
        return perf_counter() - self.started


class Canary:
    """The candidate and its share. `slow_s` is what is counted as slow; None: nothing is, yet."""

    def __init__(
        self, live: LiveModel, evidence: Evidence, salt: str, first_uses: FirstUses
    ) -> None:
        self.live = live
        self.share = 0.0
        self.slow_s: float | None = None
        self._evidence = evidence
        self._salt = salt
        self._first_uses = first_uses

    def is_chosen(self, request_id: str) -> bool:
        """Whether the candidate is asked first."""
        return is_chosen(request_id, self.share, self._salt)

    async def predict(
        self, request_id: str, stable: Callable[[], LiveModel], predict_with: AskOne
    ) -> dict[str, Any]:
        """The answer of one of the two; `stable` gives the stable model of the moment."""
        asked = _RoutedRequest(
            self._first_uses.is_first(request_id), self.share, self.slow_s, perf_counter()
        )
        if self.is_chosen(request_id):
            return await self._by_candidate(asked, stable, predict_with)
        return await self._by_stable(asked, stable(), predict_with)

    async def explain(
        self, request_id: str, stable: Callable[[], LiveModel], explain_with: AskOne
    ) -> dict[str, Any]:
        """The explanation by the model that `predict` has for this request id; it is no evidence."""
        self._first_uses.is_first(request_id)  # from now on its caller knows whose it is
        if self.is_chosen(request_id):
            try:
                return await explain_with(self.live)
            except Refusal as refusal:
                if refusal.code not in _THE_MODELS:
                    raise
        return await explain_with(stable())

    async def _by_stable(
        self, asked: _RoutedRequest, live: LiveModel, predict_with: AskOne
    ) -> dict[str, Any]:
        is_counted, failed = True, True
        try:
            answer = await predict_with(live)
            failed = False
            return answer
        except Refusal as refusal:
            is_counted = _is_the_models(refusal)
            raise
        finally:
            if is_counted:
                self._note(asked, asked.seconds, of_candidate=False, failed=failed)

    async def _by_candidate(
        self, asked: _RoutedRequest, stable: Callable[[], LiveModel], predict_with: AskOne
    ) -> dict[str, Any]:
        try:
            answer = await predict_with(self.live)
        except Refusal as refusal:
            if refusal.code in _NOT_THE_MODELS:
                raise
            failure, seconds = refusal, asked.seconds
        except BaseException:  # the caller's time is over: as often for the one as for the other
            self._note(asked, asked.seconds, of_candidate=True, failed=True)
            raise
        else:
            self._note(asked, asked.seconds, of_candidate=True, failed=False)
            return answer
        is_counted = failed = _is_the_models(failure)
        try:
            answer = await predict_with(stable())
        except Refusal:  # what neither of them answers is the request's fault, or nobody knows
            failed = False
            raise
        else:
            is_counted = failed = True
            if failure.code == "invalid_answer":
                self._evidence.fault(f"it gave an answer that is none: {failure.message}")
            return answer
        finally:
            if is_counted:
                self._note(asked, seconds, of_candidate=True, failed=failed)

    def _note(
        self, asked: _RoutedRequest, seconds: float, *, of_candidate: bool, failed: bool
    ) -> None:
        if not asked.is_evidence:
            return
        self._evidence.request(of_candidate=of_candidate, seconds=seconds)
        if failed:
            self._evidence.event("errors", asked.share, of_candidate=of_candidate)
        if asked.slow_s is not None and seconds > asked.slow_s:
            self._evidence.event("slow", asked.share, of_candidate=of_candidate)


def _is_the_models(refusal: Refusal) -> bool:
    """Whether a model failed, and not its caller. A bundle's own function that fails is its model's, whatever the caller is told."""
    return (
        refusal.status >= 500 and refusal.code not in _NOT_THE_MODELS
    ) or refusal.code == "transform_failed"
