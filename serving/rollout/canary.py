"""A canary in one worker: a share of the live requests goes to the candidate, chosen by the request's id alone, so that all workers agree.

A request that the candidate fails is answered by the stable model: callers of a bad candidate wait a little longer, and lose nothing.
What came of each request is evidence for the decision.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any

from serving.live_model import LiveModel
from serving.responses import Refusal
from serving.rollout.evidence import Evidence

_NOT_THE_MODELS = ("queue_full", "not_ready")  # refused before any model was asked
_THE_MODELS = ("model_failed", "invalid_answer")
AskOne = Callable[[LiveModel], Awaitable[dict[str, Any]]]


def is_chosen(request_id: str, share: float, version: str) -> bool:
    """Whether a request belongs to the share of the candidate of that version.

    A pure function; a larger share only adds requests. The version is drawn with, so that no id is always the first to try what is new.
    """
    drawn = int.from_bytes(hashlib.sha256(f"{version}:{request_id}".encode()).digest()[:8])
    return drawn < share * 2**64


class Canary:
    """The candidate and its share. `slow_s` is what is counted as slow; None: nothing is, yet."""

    def __init__(self, live: LiveModel, evidence: Evidence) -> None:
        self.live = live
        self.share = 0.0
        self.slow_s: float | None = None
        self._evidence = evidence

    def is_chosen(self, request_id: str) -> bool:
        """Whether the candidate is asked first."""
        return is_chosen(request_id, self.share, self.live.model.version)

    async def predict(self, request_id: str, stable: Callable[[], LiveModel], predict_with: AskOne) -> dict[str, Any]:
        """The answer of one of the two; `stable` gives the stable model of the moment."""
        if not self.is_chosen(request_id):
            return await self._watched(stable(), predict_with, of_candidate=False)
        try:
            return await self._watched(self.live, predict_with, of_candidate=True)
        except Refusal as refusal:
            if refusal.code in _NOT_THE_MODELS:
                raise
        return await predict_with(stable())

    async def explain(self, request_id: str, stable: Callable[[], LiveModel], explain_with: AskOne) -> dict[str, Any]:
        """The explanation by the model that `predict` has for this request id; it is no evidence."""
        if self.is_chosen(request_id):
            try:
                return await explain_with(self.live)
            except Refusal as refusal:
                if refusal.code not in _THE_MODELS:
                    raise
        return await explain_with(stable())

    async def _watched(self, live: LiveModel, predict_with: AskOne, *, of_candidate: bool) -> dict[str, Any]:
        share, slow_s, started = self.share, self.slow_s, perf_counter()
        is_counted, failed = True, True
        try:
            answer = await predict_with(live)
            failed = False
            return answer
        except Refusal as refusal:
            is_counted = refusal.code not in _NOT_THE_MODELS
            if of_candidate and refusal.code == "invalid_answer":
                self._evidence.fault(f"it gave an answer that is none: {refusal.message}")
            raise
        except asyncio.CancelledError:  # the caller's time is over, or the caller is gone: as often for the one as for the other
            raise
        finally:
            if is_counted:
                self._note(perf_counter() - started, share, slow_s, of_candidate=of_candidate, failed=failed)

    def _note(self, seconds: float, share: float, slow_s: float | None, *, of_candidate: bool, failed: bool) -> None:
        self._evidence.request(of_candidate=of_candidate, seconds=seconds)
        if failed:
            self._evidence.event("errors", share, of_candidate=of_candidate)
        if slow_s is not None and seconds > slow_s:
            self._evidence.event("slow", share, of_candidate=of_candidate)
