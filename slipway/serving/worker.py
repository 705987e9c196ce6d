"""The model of one worker process: loads it, replaces it, and predicts with it.

If the model cannot be served, the process stays up, is not ready, and reports the reason. So
operators see the reason instead of a crash loop.
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

from slipway.kinds.registry import input_kind
from slipway.predictor.model import InvalidAnswerError, finite_answers
from slipway.serving.extension import Extension
from slipway.serving.http.callers import CallerCheck, LoopbackOnly
from slipway.serving.http.deadlines import Deadlines
from slipway.serving.http.refusal_log import RefusalLog
from slipway.serving.http.responses import RETRY_AFTER, Refusal
from slipway.serving.http.routes import (
    FAULT,
    Exchange,
    Headers,
    Request,
    RequestTrace,
    sample_number,
)
from slipway.serving.metrics.gauges import ProcessMetrics, Sampler
from slipway.serving.metrics.service_metrics import ServiceMetrics, server_started
from slipway.serving.models.admission import Admission, Place
from slipway.serving.models.model import ServedModel
from slipway.serving.models.observers import Observers
from slipway.serving.requests.payload import Payload
from slipway.serving.settings import Settings, redact_paths
from slipway.system import files
from slipway.system.cores import num_cores
from slipway.system.errors import SlipwayError

if TYPE_CHECKING:
    from slipway.serving.models.batching import Submission
    from slipway.serving.models.live_model import LiveModel
    from slipway.serving.requests.decoding import Decoded

    AskModel = Callable[[LiveModel], Awaitable[dict[str, Any]]]

logger = logging.getLogger("bentoml.slipway")  # BentoML configures the logger "bentoml"
LOADING = "the model is being loaded and warmed up"


class ModelRouter(Protocol):
    """Routes a fraction of the requests to a second model; an extension sets ModelWorker.router."""

    live: LiveModel  # the other model

    async def predict(
        self, request_id: str, stable: Callable[[], LiveModel], predict_with: AskModel
    ) -> dict[str, Any]:
        """Return the prediction of one of the two models for a request.

        `stable` returns the current stable model.
        """

    async def explain(
        self, request_id: str, stable: Callable[[], LiveModel], explain_with: AskModel
    ) -> dict[str, Any]:
        """Return the explanation by the model that `predict` selects for this request id."""


class ModelWorker:
    """The model, queue, metrics and extensions of one worker process. It serves one model.

    `settle` is called once, after the first model is loaded and before its first request.
    """

    def __init__(
        self,
        settings: Settings,
        extensions: Sequence[Extension],
        settle: Callable[[], object] = lambda: None,
    ) -> None:
        self.settings = settings
        self.model_settings = settings  # settings of the served model
        self.metrics = ServiceMetrics()
        self.refusals = RefusalLog()
        self.reason = LOADING  # reason for not being ready
        self._settle = settle
        self._live: LiveModel | None = None
        self._loading: asyncio.Task[None] | None = None
        self.observers = Observers()
        self.router: ModelRouter | None = None
        self.request_log: Path | None = None  # set by the extension that logs requests
        self.is_draining = False  # draining: it still answers, but reports that it is not ready
        self.admission = Admission(settings.max_queue, settings.max_wait_s, num_cores(), self._shed)
        self.metrics.queue_depth(lambda: self.admission.num_requests)
        self._decoded, self._queued, self._inferred = (
            self.metrics.stage(stage) for stage in ("decode", "queue", "infer")
        )
        self._process = ProcessMetrics(self.metrics.registry, settings.workers, server_started())
        self._sampler: Sampler | None = None
        self.deadlines = Deadlines(settings.request_timeout_s)
        self.hooks = {one.name: one.attach(self) for one in extensions}
        hooks = self.hooks.values()
        self._readers = tuple(
            (one.on_response, one.sampling_rate, one.continues_traces)
            for one in hooks
            if one.on_response
        )
        self._largest_rate = max((rate for _, rate, _ in self._readers), default=0.0)
        self._fault_readers = tuple(
            one.on_response for one in hooks if one.on_response and one.receives_faults
        )
        checks = (one.caller_check for one in self.hooks.values() if one.caller_check)
        self.caller_check: CallerCheck = next(checks, None) or LoopbackOnly()

    @property
    def model(self) -> ServedModel | None:
        """The model for new requests; None if there is none."""
        return self._live.model if self._live else None

    def start(self) -> None:
        """Begin to load the model in the background."""
        if not self.settings.accept_draft:  # the verify stage needs no state
            with contextlib.suppress(OSError):  # later writes report the failure
                files.make_private_directory(self.settings.state)
        self._loading = asyncio.create_task(self._load())
        for hooks in self.hooks.values():
            if hooks.start:
                hooks.start()
        gauges = [gauge for hooks in self.hooks.values() for gauge in hooks.gauges]
        self._sampler = Sampler([self._process, *gauges], lambda: self.metrics.fault("sampling"))

    async def loaded(self) -> None:
        """Wait until loading the first model has ended, with success or failure."""
        if self._loading:
            await asyncio.wait([self._loading])
            if self._loading.cancelled():  # the worker was stopped meanwhile
                raise asyncio.CancelledError

    def drain(self) -> None:
        """Report this worker as not ready, but continue to serve requests."""
        self.is_draining = True
        self.metrics.not_ready()

    async def stop(self) -> None:
        """Finish queued requests and end the threads."""
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
        """Replace the model. Requests in flight finish on the old model; none is lost."""
        await self.take_over(self.make_live(model, "stable"))

    def make_live(self, model: ServedModel, slot: str) -> LiveModel:
        """Return a LiveModel, with a decoder and a queue, that receives no requests yet."""
        from slipway.serving.models.live_model import LiveModel  # lazily, as in `_load`

        return LiveModel(model, self.settings.max_rows, self._on_batch, slot)

    async def take_over(self, live: LiveModel) -> None:
        """Serve a LiveModel from now on, and retire the model before it."""
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
            model.version,
            actual.backend,
            actual.provider,
            actual.variant,
            requested["provider"],
            requested["variant"],
            "".join(
                f"; passed over {reason.rstrip('.')}" for reason in model.selection.passed_over
            ),
        )
        from slipway.system.version import installed_version, other_version  # with a model only

        if other := other_version(model.certificate.versions):
            logger.warning(
                "model %s was certified with Slipway %s, this is %s; it is served, but certify it "
                "again: slipway run",
                model.version,
                other,
                installed_version(),
            )
        if before:
            await before.retire()

    def require_model(self) -> ServedModel:
        """Return the served model. Raises Refusal with the reason if no model is ready."""
        return self.require_live().model

    def require_ready(self) -> ServedModel:
        """Return the served model. Raises Refusal if none is ready or the worker is draining."""
        model = self.require_model()
        if self.is_draining:
            message = "the service is shutting down; requests are still answered"
            raise Refusal("not_ready", message, headers=(RETRY_AFTER,))
        return model

    def model_info(self) -> dict[str, Any]:
        """Return the content of `GET /model`. Raises Refusal with the reason if none is ready."""
        info = self.require_model().info()
        for hooks in self.hooks.values():
            if hooks.model_info:
                info |= hooks.model_info()
        return info

    def report_wrong_answer(self, model_version: str) -> None:
        """Report to all extensions that a label contradicts this model's prediction.

        Thread-safe.
        """
        for hooks in self.hooks.values():
            if hooks.on_wrong_answer:
                hooks.on_wrong_answer(model_version)

    def new_trace(self, request_id: str, headers: Headers) -> RequestTrace | None:
        """Create the trace of a new request; None if no extension samples it.

        All are decided here, so that any other request records nothing.
        """
        number = sample_number(request_id)
        has_parent = b"traceparent" in headers
        if number >= self._largest_rate and not has_parent:  # most requests
            return None
        readers = tuple(
            reader
            for reader, rate, continues_traces in self._readers
            if number < rate or (has_parent and continues_traces)
        )
        return RequestTrace(readers=readers) if readers else None

    def ended(
        self, request: Request, route: str, status: int | None, error: str | None = None
    ) -> tuple[tuple[str, str], ...]:
        """Report the end of a request to all extensions.

        Returns the headers that they add to the response.
        """
        trace = request.trace
        if status is not None and status >= FAULT:
            trace = self._with_fault_readers(trace or RequestTrace(is_recorded=False))
        if trace is None:
            return ()
        exchange = Exchange(
            request.id,
            request.method,
            route,
            status,
            error,
            request.caller,
            request.started,
            perf_counter(),
            trace,
        )
        further: tuple[tuple[str, str], ...] = ()
        for report in trace.readers:
            further += report(exchange, request.headers)
        return further

    def refused_unread(self, refusal: Refusal, request_id: str) -> None:
        """Count a request refused before its body was read, and report it to the extensions."""
        self.metrics.refused(refusal.code)
        self.metrics.answered("other", refusal.status)
        trace = self.new_trace(request_id, {}) or RequestTrace()
        if refusal.status >= FAULT:
            trace = self._with_fault_readers(trace)
        now, status = perf_counter(), refusal.status
        exchange = Exchange(request_id, "", "other", status, refusal.code, None, now, now, trace)
        for report in trace.readers:
            report(exchange, {})

    def admit(self) -> Place:
        """Admit a request before its body is parsed, or raise Refusal. Use it in a `with`."""
        return Place(self.admission)

    async def predict(self, payload: Payload, request_id: str) -> dict[str, Any]:
        """Admit a request, and return its prediction. Raises Refusal."""
        with self.admit() as place:
            return await self.predict_inside(place, payload, request_id)

    def predict_inside(
        self, place: Place, payload: Payload, request_id: str, trace: RequestTrace | None = None
    ) -> Coroutine[Any, Any, dict[str, Any]]:
        """Return the prediction for an admitted request, from the model that the router selects.

        Raises Refusal if there is no prediction. `trace` receives the stages of the request.
        """
        if input_kind(payload.kind).takes_files:  # rows are counted once decoded
            place.set_num_items(len(payload.items))
        if self.router is None:
            return self._predict_with(self.require_live(), place, payload, request_id, trace)
        return self.router.predict(
            request_id,
            self.require_live,
            lambda live: self._predict_with(live, place, payload, request_id, trace),
        )

    def _never_ran(self, submission: Submission[Any] | None) -> bool:
        """Return True if no batch took a failed request; counts the time that it waited."""
        if submission is None:
            return True
        if not submission.num_taken:
            self.metrics.waited(submission.waited())
        return not submission.num_taken

    async def _predict_with(
        self,
        live: LiveModel,
        place: Place,
        payload: Payload,
        request_id: str,
        trace: RequestTrace | None,
    ) -> dict[str, Any]:
        """Return the prediction of the model `live`. Raises Refusal if there is none.

        A request that is cancelled before its first batch counts as expired.
        """
        model, submission = live.model, None
        if trace is not None:
            trace.model_version = model.version
        try:
            with live:  # the model must not retire before the request ends
                reader, is_list = live.reader(payload), False
                if reader:
                    submission = live.batcher.submit_unread(reader, 1)
                else:
                    decoded = await self._decode(live, payload, trace)
                    place.set_num_items(len(decoded.inputs))
                    is_list = decoded.is_list
                    submission = live.batcher.submit(decoded.inputs)
                rows = await submission.answer
            answers = finite_answers(rows)
        except asyncio.CancelledError:
            if self._never_ran(submission):
                self.metrics.expired()
            raise
        except InvalidAnswerError as error:
            logger.error("request %s: model %s failed: %s", request_id, model.version, error)
            raise Refusal("invalid_answer", f"{error}; this request has no prediction") from None
        except Exception as error:
            if self._never_ran(submission):  # not decoded, or shed by admission
                raise
            logger.exception("request %s: model %s failed", request_id, model.version)
            message = "the model failed on this batch; the log of the service has the details"
            raise Refusal("model_failed", message) from error
        queued, begun, ended = submission.queued, submission.begun, submission.ended
        if reader:
            self._decoded(submission.read_ended - submission.read_started)
        self._queued(begun - queued)
        self.metrics.waited(begun - queued)
        self._inferred(ended - begun)
        self.metrics.answer(live.slot)
        if trace is not None:
            trace.num_rows = len(answers)
            if reader:
                trace.times += (submission.read_started, submission.read_ended)
            trace.times += (queued, begun, begun, ended)
        if self.observers.all:
            self.observers.note(
                (request_id, payload, is_list, submission.inputs, model, rows, answers)
            )
        return ({"predictions": answers} if is_list else answers[0]) | {
            "model_version": model.version,
            "request_id": request_id,
        }

    async def _decode(
        self, live: LiveModel, payload: Payload, trace: RequestTrace | None
    ) -> Decoded:
        started = perf_counter()
        decoded = await live.decoder.decode(*payload.items)
        ended = perf_counter()
        self._decoded(ended - started)
        if trace is not None:
            trace.times += (started, ended)
        return decoded

    def require_live(self) -> LiveModel:
        """Return the served model with its queue. Raises Refusal with the reason without one."""
        if self._live is None:
            raise Refusal("not_ready", self.reason, headers=(RETRY_AFTER,))
        return self._live

    def _with_fault_readers(self, trace: RequestTrace) -> RequestTrace:
        """Add the hooks that receive all faults to those that sampled a request."""
        trace.readers += tuple(one for one in self._fault_readers if one not in trace.readers)
        return trace

    def _shed(self, num_kept: int) -> None:
        """Refuse waiting rows, so that about `num_kept` rows stay in the queues.

        The stable model and a candidate have a queue each; both lose the same fraction.
        """
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
        # Lazily: the server process imports this module, but needs no runtimes.
        from slipway.serving.models.loader import load_model

        self.metrics.model(None)
        try:
            for hooks in self.hooks.values():
                if hooks.select_model:
                    self.model_settings = await asyncio.to_thread(hooks.select_model)
            model = await asyncio.to_thread(load_model, self.model_settings)
        except SlipwayError as error:
            self.reason = redact_paths(str(error), self.settings)
            logger.error("not ready: %s", error)
        except Exception as error:
            self.reason = redact_paths(
                f"the model could not be loaded: {type(error).__name__}: {error}", self.settings
            )
            logger.exception("not ready: the model could not be loaded")
        else:
            self._settle()
            await self.swap(model)
