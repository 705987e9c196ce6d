"""From a request's bytes to an answer, and the life of the model behind it: loading, ready or refused with a reason.

A model that cannot be served does not end the process: it stays up, not ready, and says why, so that
an operator sees the reason and not a crash loop.
"""

import asyncio
import contextlib
import logging
from time import perf_counter
from typing import Any

from serving.batching import BatchAnswer, MicroBatcher
from serving.decoding import Decoded, ImageDecoder
from serving.model import InvalidAnswerError, ServedModel, load_model
from serving.monitoring import Monitoring
from serving.responses import RETRY_AFTER, Refusal
from serving.rows import RowDecoder
from serving.settings import Settings
from slipway.columns import ColumnContract
from slipway.errors import SlipwayError

logger = logging.getLogger("bentoml.slipway")  # below "bentoml", which is the logger that BentoML configures


class Inference:
    """One worker's model, queue and metrics."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.monitoring = Monitoring()
        self.reason = "the model is being loaded and warmed up"  # why it is not ready
        self.model: ServedModel | None = None
        self._batcher: MicroBatcher | None = None
        self._decoder: ImageDecoder | RowDecoder | None = None
        self._loading: asyncio.Task[None] | None = None
        self._num_pending = 0

    def start(self) -> None:
        """Begin to load the model; the event loop stays free to answer that it is not ready."""
        self._loading = asyncio.create_task(self._load())

    async def loaded(self) -> None:
        """Wait until the model is ready or refused."""
        if self._loading:
            await self._loading

    async def stop(self) -> None:
        """Finish what is queued and end the threads."""
        if self._loading:
            self._loading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._loading
        self.reason = "the service is shutting down"
        self.model = None
        self.monitoring.model(None)
        if self._batcher and self._decoder:
            await self._batcher.close()
            self._decoder.close()

    def require_model(self) -> ServedModel:
        """The model; Refusal with the reason if it is not ready."""
        if self.model is None:
            raise Refusal("not_ready", self.reason, headers=(RETRY_AFTER,))
        return self.model

    async def predict(self, payload: bytes) -> dict[str, Any]:
        """The answer to one encoded image, or to rows as JSON, without its request id; Refusal if it gets none."""
        model = self.require_model()
        if self._num_pending >= self.settings.max_queue:
            raise Refusal("queue_full", f"{self._num_pending} requests are waiting, the limit; try again later", headers=(RETRY_AFTER,))
        self._num_pending += 1
        try:
            decoded = await self._decode(payload)
            batched = await self._run(decoded)
            answers = [model.answer(row.outputs, row.score) for row in batched]
            return ({"predictions": answers} if decoded.is_list else answers[0]) | {"model_version": model.version}
        except InvalidAnswerError as error:
            logger.error("model %s: %s", model.version, error)
            raise Refusal("invalid_answer", f"{error}; this request has no prediction") from None
        finally:
            self._num_pending -= 1

    def exposition(self) -> bytes:
        """The metrics, with the depth of the queue as it is now."""
        self.monitoring.queue_depth(self._num_pending)
        return self.monitoring.exposition()

    async def _decode(self, payload: bytes) -> Decoded:
        assert self._decoder
        started = perf_counter()
        decoded = await self._decoder.decode(payload)
        self.monitoring.stage("decode", perf_counter() - started)
        return decoded

    async def _run(self, decoded: Decoded) -> list[BatchAnswer]:
        assert self._batcher
        try:
            batched = await self._batcher.submit_all(decoded.inputs)
        except Exception as error:
            logger.exception("the model failed")
            raise Refusal("model_failed", "the model failed on this batch; the log of the service has the details") from error
        first, last = batched[0], batched[-1]  # several rows may take several batches
        self.monitoring.stage("queue", first.queue_seconds)
        self.monitoring.stage("infer", last.queue_seconds + last.infer_seconds - first.queue_seconds)
        return batched

    def _on_batch(self, num_rows: int) -> None:
        self.monitoring.batch(num_rows)
        self.monitoring.queue_depth(self._num_pending)

    async def _load(self) -> None:
        self.monitoring.model(None)
        try:
            model = await asyncio.to_thread(load_model, self.settings)
        except SlipwayError as error:
            self.reason = str(error)
            logger.error("not ready: %s", error)
        except Exception as error:
            self.reason = f"the model could not be loaded: {type(error).__name__}: {error}"
            logger.exception("not ready")
        else:
            self._serve(model)

    def _serve(self, model: ServedModel) -> None:
        self._batcher = MicroBatcher(model.run, model.max_batch_size, self._on_batch)
        contract = model.bundle.manifest.input
        if isinstance(contract, ColumnContract):
            self._decoder = RowDecoder(contract, self.settings.max_rows)
        else:
            self._decoder = ImageDecoder(contract)
        self.model, self.reason = model, ""
        self.monitoring.model(model)
        actual, requested = model.selection.actual, model.selection.requested
        logger.info(
            "ready: model %s runs on %s/%s as %s (requested %s/%s)%s",
            model.version, actual.backend, actual.provider, actual.variant, requested["provider"], requested["variant"],
            "".join(f"; passed over {reason}" for reason in model.selection.passed_over),
        )  # fmt: skip
