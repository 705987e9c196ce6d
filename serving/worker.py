"""From a request's bytes to an answer, and the life of the model behind it: loading, ready or refused with a reason, swapped.

A model that cannot be served does not end the process: it stays up, not ready, and says why, so that
an operator sees the reason and not a crash loop.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Coroutine, Sequence
from http import HTTPStatus
from time import perf_counter
from typing import Any

from serving.auth.keys import KeyFile
from serving.explaining.background import predictions_first
from serving.explaining.explainer import Explainer
from serving.http.deadlines import Deadlines
from serving.http.responses import RETRY_AFTER, Refusal
from serving.http.server_paths import without_server_paths
from serving.http.worker_thread import OwnThread
from serving.metrics.gpu_metrics import open_gpu_metrics
from serving.metrics.process_metrics import ProcessMetrics
from serving.metrics.sampling import Sampler, Source
from serving.metrics.service_metrics import ServiceMetrics, server_started
from serving.models.admission import Admission, Place
from serving.models.live_model import LiveModel
from serving.models.model import InvalidAnswerError, ServedModel, finite_answers, load_model
from serving.models.rebuilding import COMMAND, RebuildState, build, first_state
from serving.monitoring.feedback import Feedback
from serving.monitoring.watcher import limits_of, open_watcher
from serving.request_log.logger import open_keeper
from serving.request_log.observers import Observers
from serving.requests.decoding import Decoded
from serving.requests.payload import Payload
from serving.rollout.canary import Canary
from serving.rollout.following import Follower
from serving.settings import Settings
from slipway.system import files
from slipway.system.cores import num_cores
from slipway.system.errors import EngineError, SlipwayError

logger = logging.getLogger(
    "bentoml.slipway"
)  # below "bentoml", which is the logger that BentoML configures
LOADING = "the model is being loaded and warmed up"  # why it is not ready at first


class ModelWorker:
    """One worker's model, queue and metrics.

    `rebuild_command` is the process that builds an engine for this machine. `settle` is called once, when the first model is loaded
    and no request goes to it yet.
    """

    def __init__(
        self,
        settings: Settings,
        rebuild_command: Sequence[str] = COMMAND,
        settle: Callable[[], object] = lambda: None,
    ) -> None:
        self.settings = settings
        self.metrics = ServiceMetrics()
        self.reason = LOADING  # why it is not ready
        self.rebuild = RebuildState("not_asked_for", "the model is being loaded")
        self._rebuild_command = rebuild_command
        self._settle = settle
        self._live: LiveModel | None = None
        self._loading: asyncio.Task[None] | None = None
        self._rebuilding: asyncio.Task[None] | None = None
        self.observers = Observers()  # of what is answered
        self.is_draining = False  # it still answers, but is not ready: no more should be sent here
        self._admission = Admission(
            settings.max_queue, settings.max_wait_s, num_cores(), self._shed
        )
        self.metrics.queue_depth(lambda: self._admission.num_requests)
        self._decoded, self._queued, self._inferred = (
            self.metrics.stage(stage) for stage in ("decode", "queue", "infer")
        )
        self.canary: Canary | None = None  # the candidate that gets a share of the requests
        self.rollout = Follower(self)
        self._explainer = Explainer(settings.request_timeout_s / 2)
        self.feedback: Feedback | None = None  # None where nothing is watched
        self.parts: dict[str, Callable[[], dict[str, Any]]] = {"rollout": self.rollout.status}
        self._process = ProcessMetrics(self.metrics.registry, settings.workers, server_started())
        self._sampler: Sampler | None = None
        self.deadlines = Deadlines(settings.request_timeout_s)  # of requests
        self.translating = OwnThread(
            "slipway-translate", settings.max_queue
        )  # large messages between another form and `/predict`'s

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
        keeper = open_keeper(self.settings, self.metrics.kept)
        if keeper:
            self.observers.add(keeper)
        watcher = open_watcher(
            self.settings, self.metrics.watching, lambda: self.model, self.rollout.note_wrong
        )
        if watcher:
            self.observers.add(watcher)
            self.feedback = Feedback(
                self.settings,
                limits_of(self.settings),
                self.metrics.watching,
                self.rollout.note_wrong,
            )
            self.parts |= {"drift": watcher.drift_status, "feedback": watcher.feedback_status}
        gpus = open_gpu_metrics(self.metrics.registry)
        sources: list[Source] = [self._process]
        if gpus:
            self.parts["gpu"] = gpus.status
            sources.append(gpus)
        if self.settings.keys:
            sources.append(KeyFile(self.settings.keys, self.metrics.key_file))
        self._sampler = Sampler(sources, lambda: self.metrics.watching.error("sampling"))

    async def loaded(self) -> None:
        """Wait until the model is ready or refused."""
        if self._loading:
            await self._loading

    async def rebuilt(self) -> None:
        """Wait until a rebuild, if there is one, has ended and its engine is served or refused."""
        await self.loaded()
        if self._rebuilding:
            await self._rebuilding

    def drain(self) -> None:
        """Be ready no more, and answer whoever still asks."""
        self.is_draining = True
        self.metrics.not_ready()

    async def stop(self) -> None:
        """Finish what is queued and end the threads and the rebuild."""
        for task in (self._loading, self._rebuilding):
            if task:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        self.reason = "the service is shutting down"
        await self.rollout.stop()
        live, self._live = self._live, None
        self.metrics.model(None)
        if live:
            await live.retire()
        await self.observers.close()
        if self.feedback:
            await asyncio.to_thread(self.feedback.close)
        if self._sampler:
            await asyncio.to_thread(self._sampler.close)
        self.translating.close()
        self.metrics.close()

    async def swap(self, model: ServedModel) -> None:
        """Let new requests go to `model`, which is warm. Those in flight finish on the one before, which then ends; none is lost."""
        await self.take_over(self.make_live(model, "stable"))

    def make_live(self, model: ServedModel, slot: str) -> LiveModel:
        """A model with its decoder and queue, which no request goes to yet."""
        return LiveModel(model, self.settings.max_rows, self._on_batch, slot)

    async def take_over(self, live: LiveModel) -> None:
        """`swap` with a model that has its queue already."""
        before, self._live = self._live, live
        live.slot = "stable"
        model = live.model
        self._admission.max_batch_size = model.max_batch_size
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
        return self._require_live().model

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
        rebuild = {"status": self.rebuild.status, "reason": self.rebuild.reason}
        return self.require_model().card() | {"rebuild": rebuild, "rolled_out": self.rollout.card()}

    def require_room(self) -> None:
        """Refusal if a request for a prediction whose body has not arrived yet would not be let in now."""
        self._admission.require_room()

    def admit(self) -> Place:
        """A place inside for a request whose body is there and not parsed; Refusal if it has to stay outside. Leave it as a context."""
        return Place(self._admission)

    async def predict(self, payload: Payload, request_id: str) -> dict[str, Any]:
        """`predict_inside` of a request that has no place yet."""
        with self.admit() as place:
            return await self.predict_inside(place, payload, request_id)

    def predict_inside(
        self, place: Place, payload: Payload, request_id: str
    ) -> Coroutine[Any, Any, dict[str, Any]]:
        """The answer to one image or to what came in a list; Refusal if it gets none."""
        if payload.kind == "images":  # the rows in a text are known once it is decoded
            place.has(len(payload.items))
        if self.canary is None:
            return self._predict_with(self._require_live(), place, payload, request_id)
        return self.canary.predict(
            request_id,
            self._require_live,
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

    def require_leisure(self) -> None:
        """Refusal if nothing is explained now, because predictions take all there is or another explanation is under way."""
        if self._admission.has_more_than_it_can_do():
            raise predictions_first(self._admission.retry_after())
        self._explainer.require_idle()

    async def explain(self, payload: Payload, request_id: str) -> dict[str, Any]:
        """The answer to one image or row with what it rests on, without its request id; Refusal if there is none."""
        stable = self._require_live()
        self.require_leisure()
        if self.canary is None:
            return await self._explain_with(stable, payload, request_id)
        return await self.canary.explain(
            request_id,
            self._require_live,
            lambda live: self._explain_with(live, payload, request_id),
        )

    async def _explain_with(
        self, live: LiveModel, payload: Payload, request_id: str
    ) -> dict[str, Any]:
        try:
            return await self._explainer.explain(live, payload)
        except Refusal as refusal:
            if refusal.status == HTTPStatus.INTERNAL_SERVER_ERROR:
                logger.error(
                    "request %s: model %s: %s", request_id, live.model.version, refusal.message
                )
            raise

    def status_of(self, part: str) -> dict[str, Any] | None:
        """How a part of the service fares, for `/status`; None where it is not there. Called on a thread, at most once a second."""
        return self.parts[part]() if part in self.parts else None

    def exposition(self) -> bytes:
        """The metrics."""
        return self.metrics.exposition()

    def _require_live(self) -> LiveModel:
        if self._live is None:
            raise Refusal("not_ready", self.reason, headers=(RETRY_AFTER,))
        return self._live

    def _shed(self, num_kept: int) -> None:
        """Each queue keeps a part like that which waits there."""
        lives = (self._live, self.canary.live if self.canary else None)
        waiting = [(live.batcher, live.batcher.num_waiting) for live in lives if live]
        num_waiting = sum(number for _, number in waiting)
        for batcher, number in waiting:
            if number:
                batcher.shed(math.ceil(num_kept * number / num_waiting), self._admission.overload)

    def _on_batch(self, num_rows: int, fill: float, seconds: float) -> None:
        self._admission.ran(num_rows, seconds)
        self.metrics.batch(num_rows, fill)

    async def _load(self) -> None:
        self.metrics.model(None)
        try:
            settings = await asyncio.to_thread(self.rollout.begin)
            model = await asyncio.to_thread(load_model, settings)
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
        self.rollout.start()
        self.rebuild = first_state(self.settings, self.model)
        if self.rebuild.status == "impossible":
            logger.error("no engine can be built for this machine: %s", self.rebuild.reason)
        if self.rebuild.status == "building":
            logger.info("an engine for this machine is built %s", self.rebuild.reason)
            self._rebuilding = asyncio.create_task(self._rebuild())

    def _require_stable(self, settings: Settings) -> None:
        """EngineError if these are no longer the settings of the stable model."""
        if settings != self.rollout.stable_settings:
            raise EngineError(
                "another model was rolled out meanwhile; its engine is built at the next start"
            )

    async def _rebuild(self) -> None:
        """Build an engine, load it as any model is loaded, and swap it in; whatever goes wrong, the model before serves on."""
        try:
            settings = self.rollout.stable_settings
            await build(settings, self._rebuild_command)
            self._require_stable(settings)
            model = await asyncio.to_thread(load_model, settings)
            self._require_stable(settings)  # a promotion while it was loaded must not be undone
            if model.selection.actual.backend != "tensorrt":
                raise EngineError("; ".join(model.selection.passed_over))
            await self.swap(model)
        except SlipwayError as error:
            self.rebuild = RebuildState("failed", str(error))
            logger.error("the engine for this machine is not served: %s", error)
        except Exception as error:
            self.rebuild = RebuildState("failed", f"{type(error).__name__}: {error}")
            logger.exception("the engine for this machine is not served")
        else:
            self.rebuild = RebuildState(
                "swapped", f"the engine in {self.settings.rebuilt_engine} is served"
            )
