"""From a request's bytes to an answer, and the life of the model behind it: loading, ready or refused with a reason, swapped.

A model that cannot be served does not end the process: it stays up, not ready, and says why, so that
an operator sees the reason and not a crash loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from serving.extension import Extension
from serving.http.callers import CallerCheck, LoopbackOnly
from serving.http.deadlines import Deadlines
from serving.http.responses import RETRY_AFTER, Refusal
from serving.http.server_paths import without_server_paths
from serving.metrics.process_metrics import ProcessMetrics
from serving.metrics.sampling import Sampler
from serving.metrics.service_metrics import ServiceMetrics, server_started
from serving.models.admission import Admission, Place
from serving.models.model import InvalidAnswerError, ServedModel, finite_answers
from serving.models.observers import Observers
from serving.requests.payload import Payload
from serving.settings import Settings
from slipway.kinds.registry import input_kind
from slipway.system import files
from slipway.system.cores import num_cores
from slipway.system.errors import SlipwayError

if TYPE_CHECKING:
    from serving.models.live_model import LiveModel
    from serving.requests.decoding import Decoded

    AskOne = Callable[[LiveModel], Awaitable[dict[str, Any]]]

logger = logging.getLogger(
    "bentoml.slipway"
)  # below "bentoml", which is the logger that BentoML configures
LOADING = "the model is being loaded and warmed up"  # why it is not ready at first


class ModelRouter(Protocol):
    """Sends some of the requests to another model than the stable one. An extension sets ModelWorker.router."""

    live: LiveModel  # the other model

    async def predict(
        self, request_id: str, stable: Callable[[], LiveModel], predict_with: AskOne
    ) -> dict[str, Any]:
        """The answer of one of the two models; `stable` gives the stable model of the moment."""

    async def explain(
        self, request_id: str, stable: Callable[[], LiveModel], explain_with: AskOne
    ) -> dict[str, Any]:
        """The explanation by the model that `predict` has for this request id."""


class ModelWorker:
    """One worker's model, queue and metrics. One model name today.

    `settle` is called once, when the first model is loaded and no request goes to it yet.
    """

    def __init__(
        self,
        settings: Settings,
        extensions: Sequence[Extension],
        settle: Callable[[], object] = lambda: None,
    ) -> None:
        self.settings = settings
        self.model_settings = settings  # of the model that is served
        self.metrics = ServiceMetrics()
        self.reason = LOADING  # why it is not ready
        self._settle = settle
        self._live: LiveModel | None = None
        self._loading: asyncio.Task[None] | None = None
        self.observers = Observers()  # of what is answered
        self.router: ModelRouter | None = None
        self.request_log: Path | None = None  # the folder that an extension logs requests to
        self.is_draining = False  # it still answers, but is not ready: no more should be sent here
        self.admission = Admission(settings.max_queue, settings.max_wait_s, num_cores(), self._shed)
        self.metrics.queue_depth(lambda: self.admission.num_requests)
        self._decoded, self._queued, self._inferred = (
            self.metrics.stage(stage) for stage in ("decode", "queue", "infer")
        )
        self._process = ProcessMetrics(self.metrics.registry, settings.workers, server_started())
        self._sampler: Sampler | None = None
        self.deadlines = Deadlines(settings.request_timeout_s)  # of requests
        self.hooks = {one.name: one.attach(self) for one in extensions}
        checks = (one.caller_check for one in self.hooks.values() if one.caller_check)
        self.caller_check: CallerCheck = next(checks, None) or LoopbackOnly()

    @property
    def model(self) -> ServedModel | None:
        """The model that new requests go to, or None while there is none."""
        return self._live.model if self._live else None

    def start(self) -> None:
        """Begin to load the model; the event loop stays free to answer that it is not ready."""
        if not self.settings.accept_draft:  # which needs none
            with contextlib.suppress(OSError):  # what cannot be written there says so itself
                files.make_private_directory(self.settings.state)
        self._loading = asyncio.create_task(self._load())
        for hooks in self.hooks.values():
            if hooks.start:
                hooks.start()
        gauges = [gauge for hooks in self.hooks.values() for gauge in hooks.gauges]
        self._sampler = Sampler([self._process, *gauges], lambda: self.metrics.fault("sampling"))

    async def loaded(self) -> None:
        """Wait until the model is ready or refused."""
        if self._loading:
            await asyncio.wait([self._loading])
            if self._loading.cancelled():  # the worker stops: whoever waits here must not go on
                raise asyncio.CancelledError

    def drain(self) -> None:
        """Be ready no more, and answer whoever still asks."""
        self.is_draining = True
        self.metrics.not_ready()

    async def stop(self) -> None:
        """Finish what is queued and end the threads."""
        if self._loading:
            self._loading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._loading
        self.reason = "the service is shutting down"
        for hooks in self.hooks.values():
            if hooks.stop:
                await hooks.stop()
        live, self._live = self._live, None
        self.metrics.model(None)
        if live:
            await live.retire()
        await self.observers.close()
        for hooks in self.hooks.values():
            if hooks.close:
                await hooks.close()
        if self._sampler:
            await asyncio.to_thread(self._sampler.close)
        self.metrics.close()

    async def swap(self, model: ServedModel) -> None:
        """Let new requests go to `model`, which is warm. Those in flight finish on the one before, which then ends; none is lost."""
        await self.take_over(self.make_live(model, "stable"))

    def make_live(self, model: ServedModel, slot: str) -> LiveModel:
        """A model with its decoder and queue, which no request goes to yet."""
        from serving.models.live_model import LiveModel  # as in `_load`

        return LiveModel(model, self.settings.max_rows, self._on_batch, slot)

    async def take_over(self, live: LiveModel) -> None:
        """`swap` with a model that has its queue already."""
        before, self._live = self._live, live
        live.slot = "stable"
        model = live.model
        self.model_settings = model.settings
        self.admission.max_batch_size = model.max_batch_size
        self.reason = ""
        self.metrics.model(model)
        actual, requested = model.selection.actual, model.selection.requested
        logger.info(
            "ready: model %s runs on %s/%s as %s (requested %s/%s)%s",
            model.version, actual.backend, actual.provider, actual.variant, requested["provider"], requested["variant"],
            "".join(f"; passed over {reason}" for reason in model.selection.passed_over),
        )  # fmt: skip
        if before:
            await before.retire()

    def require_model(self) -> ServedModel:
        """The model; Refusal with the reason if it is not ready."""
        return self.require_live().model

    def require_ready(self) -> ServedModel:
        """The model; Refusal with the reason if no more requests should be sent here."""
        model = self.require_model()
        if self.is_draining:
            raise Refusal(
                "not_ready",
                "the service is shutting down; requests are still answered",
                headers=(RETRY_AFTER,),
            )
        return model

    def card(self) -> dict[str, Any]:
        """What `/model` shows; Refusal with the reason if the model is not ready."""
        info = self.require_model().card()
        for hooks in self.hooks.values():
            if hooks.model_info:
                info |= hooks.model_info()
        return info

    def report_wrong_answer(self, model_version: str) -> None:
        """Tell the extensions that a label proved an answer of this model wrong. Any thread may call it."""
        for hooks in self.hooks.values():
            if hooks.on_wrong_answer:
                hooks.on_wrong_answer(model_version)

    def require_room(self) -> None:
        """Refusal if a request for a prediction whose body has not arrived yet would not be let in now."""
        self.admission.require_room()

    def admit(self) -> Place:
        """A place inside for a request whose body is there and not parsed; Refusal if it has to stay outside. Leave it as a context."""
        return Place(self.admission)

    async def predict(self, payload: Payload, request_id: str) -> dict[str, Any]:
        """`predict_inside` of a request that has no place yet."""
        with self.admit() as place:
            return await self.predict_inside(place, payload, request_id)

    def predict_inside(
        self, place: Place, payload: Payload, request_id: str
    ) -> Coroutine[Any, Any, dict[str, Any]]:
        """The answer to one image or to what came in a list; Refusal if it gets none."""
        if input_kind(payload.kind).takes_files:  # others are counted once they are decoded
            place.has(len(payload.items))
        if self.router is None:
            return self._predict_with(self.require_live(), place, payload, request_id)
        return self.router.predict(
            request_id,
            self.require_live,
            lambda live: self._predict_with(live, place, payload, request_id),
        )

    async def _predict_with(
        self, live: LiveModel, place: Place, payload: Payload, request_id: str
    ) -> dict[str, Any]:
        """The answer of one model, which the request may not outlive.

        One that is cancelled before the model took any of it is counted as expired.
        """
        model, submission = live.model, None
        try:
            with live:  # it does not end before the request does
                reader, is_list = live.reader(payload), False
                if reader:
                    submission = live.batcher.submit_unread(reader, 1)
                else:
                    decoded = await self._decode(live, payload)
                    place.has(len(decoded.inputs))
                    is_list = decoded.is_list
                    submission = live.batcher.submit(decoded.inputs)
                rows = await submission.answer
            answers = finite_answers(rows)
        except asyncio.CancelledError:
            if submission is None or not submission.num_taken:
                self.metrics.expired()
            raise
        except InvalidAnswerError as error:
            logger.error("request %s: model %s: %s", request_id, model.version, error)
            raise Refusal("invalid_answer", f"{error}; this request has no prediction") from None
        except Exception as error:
            if (
                submission is None or not submission.num_taken
            ):  # it could not be decoded, or was sent out of the queue again
                raise
            logger.exception("request %s: model %s failed", request_id, model.version)
            raise Refusal(
                "model_failed",
                "the model failed on this batch; the log of the service has the details",
            ) from error
        if reader:
            self._decoded(submission.read_seconds)
        self._queued(submission.queue_seconds)
        self._inferred(submission.infer_seconds)
        self.metrics.answer(live.slot)
        if self.observers.all:
            self.observers.note(
                (request_id, payload, is_list, submission.inputs, model, rows, answers)
            )
        return ({"predictions": answers} if is_list else answers[0]) | {
            "model_version": model.version,
            "request_id": request_id,
        }

    async def _decode(self, live: LiveModel, payload: Payload) -> Decoded:
        started = perf_counter()
        decoded = await live.decoder.decode(*payload.items)
        self._decoded(perf_counter() - started)
        return decoded

    def exposition(self) -> bytes:
        """The metrics."""
        return self.metrics.exposition()

    def require_live(self) -> LiveModel:
        """The model that takes requests; Refusal with the reason if there is none."""
        if self._live is None:
            raise Refusal("not_ready", self.reason, headers=(RETRY_AFTER,))
        return self._live

    def _shed(self, num_kept: int) -> None:
        """Each queue keeps a part like that which waits there."""
        lives = (self._live, self.router.live if self.router else None)
        waiting = [(live.batcher, live.batcher.num_waiting) for live in lives if live]
        num_waiting = sum(number for _, number in waiting)
        for batcher, number in waiting:
            if number:
                batcher.shed(math.ceil(num_kept * number / num_waiting), self.admission.overload)

    def _on_batch(self, num_rows: int, fill: float, seconds: float) -> None:
        self.admission.ran(num_rows, seconds)
        self.metrics.batch(num_rows, fill)

    async def _load(self) -> None:
        # The server process, which imports this module too, needs neither runtimes nor decoders.
        from serving.models.loading import load_model

        self.metrics.model(None)
        try:
            for hooks in self.hooks.values():
                if hooks.select_model:
                    self.model_settings = await asyncio.to_thread(hooks.select_model)
            model = await asyncio.to_thread(load_model, self.model_settings)
        except SlipwayError as error:
            self.reason = without_server_paths(str(error), self.settings)
            logger.error("not ready: %s", error)
        except Exception as error:
            self.reason = without_server_paths(
                f"the model could not be loaded: {type(error).__name__}: {error}", self.settings
            )
            logger.exception("not ready")
        else:
            self._settle()
            await self.swap(model)
