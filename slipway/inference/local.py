"""A certified model in this process, with the answers of the service.

    with slipway.load("my_project") as model:
        model.predict("picture.png").label

The files pass the same checks as in the service, the same variant is chosen, and ONNX Runtime runs
with the same options. So the answers to a batch equal those of a service with one worker, bit for
bit.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Protocol, Self, overload

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image

from slipway.artifacts.bundle import MANIFEST
from slipway.inference.predictions import (
    Explanation,
    Prediction,
    Predictions,
    explanation_of,
    index_of,
    prediction_of,
)
from slipway.inputs.contract import InputContract
from slipway.kinds.registry import input_kind
from slipway.predictor.explaining.explanation import (
    ROWS,
    explain_item,
    require_explainable,
    rows_within,
)
from slipway.predictor.loader import open_model
from slipway.predictor.model import CertifiedModel, finite_answers
from slipway.predictor.options import ModelOptions, ProviderOption, Variant
from slipway.system.cores import num_cores
from slipway.system.errors import BundleError, DataError, UnavailableError

_TRIES = 3  # measurements of a row's time; the quickest counts, because other work may disturb


class ItemReader(Protocol):
    """Converts Python objects to network inputs. Each kind of input has its own reader."""

    def read(self, given: object, batch_size: int) -> tuple[Iterator[NDArray[Any]], bool]:
        """Return batches of at most `batch_size` inputs, and True if `given` is a list."""

    def close(self) -> None:
        """End the threads."""


class LoadedModel:
    """A certified model, safe to share between threads. `close` it, or use it in a `with`.

    >>> with slipway.load("my_project") as model:
    ...     print(type(model.predict(row)).__name__)
    ClassPrediction
    """

    def __init__(self, model: CertifiedModel) -> None:
        contract = model.bundle.manifest.input
        make: Callable[[InputContract], ItemReader] = input_kind(contract.kind).load_part("items")
        self._model: CertifiedModel | None = model
        self._reader = make(contract)

    @overload
    def predict(self, given: list[Any] | tuple[Any, ...]) -> Predictions: ...
    @overload
    def predict(
        self, given: str | os.PathLike[str] | bytes | Image | Mapping[str, Any]
    ) -> Prediction: ...
    @overload
    def predict(self, given: Any) -> Any: ...
    def predict(self, given: Any) -> Any:
        """Return the prediction for an item, or a list for a list, array or DataFrame of items.

        An image is a path, encoded bytes, a PIL image, or an array of uint8 (height, width) or
        (height, width, channels). A row is a dict. Raises DataError for an item that the model does
        not accept, with its position.

        >>> model.predict([row])[0] == model.predict(row)
        True
        """
        model = certified_model(self)
        batches, is_list = self._reader.read(given, model.max_batch_size)
        answers = [
            prediction_of(answer)
            for inputs in batches
            for answer in finite_answers(model.answer_rows(inputs))
        ]
        return Predictions(answers, index_of(given)) if is_list else answers[0]

    def explain(self, item: Any, budget_s: float = 5.0) -> Explanation:
        """Return the prediction for one item, explained by changed copies of the item.

        `budget_s` limits the time that the model runs; in the service this limit is half of
        SLIPWAY_REQUEST_TIMEOUT_S.

        >>> why = model.explain(row, budget_s=1)
        >>> sum(one["contribution"] for one in why.details["columns"]) <= 1
        True
        """
        model = certified_model(self)
        require_explainable(model.input_kind)
        inputs = [row for batch in self._reader.read(item, 1)[0] for row in batch]
        if len(inputs) != 1:
            raise DataError(f"found {len(inputs)} items, expected one: explain each by itself.")
        seconds = float("inf")
        for _ in range(_TRIES):
            started = perf_counter()
            (own,) = model.answer_rows(inputs[0][np.newaxis])
            seconds = min(seconds, perf_counter() - started)
            if seconds * ROWS[0] <= budget_s:
                break
        (answer,) = finite_answers([own])

        async def run(rows: NDArray[Any]) -> NDArray[np.float32]:
            size = model.max_batch_size
            slices = (rows[begin : begin + size] for begin in range(0, len(rows), size))
            return np.concatenate([model.run(part).outputs for part in slices])

        explanation = explain_item(
            model.bundle.manifest,
            inputs[0],
            own.outputs,
            model.explained_place(own.outputs),
            run,
            rows_within(seconds, budget_s),
        )
        with ThreadPoolExecutor(1) as thread:  # a notebook's own thread has an event loop already
            content = thread.submit(asyncio.run, explanation).result()
        return explanation_of(answer | {"explanation": content})

    def info(self) -> dict[str, Any]:
        """Describe the model as `GET /model` does, with the verdict of the quality gates first.

        `gates` is "passed", "none", "missed" or "unjudged". The service serves a model with the
        first two only.

        >>> model.info()["gates"]
        'passed'
        """
        model = certified_model(self)
        return {"gates": model.certificate.gates} | model.info()

    def close(self) -> None:
        """Free the model. Calls in other threads may still finish.

        >>> with slipway.load("my_project") as model:
        ...     answer = model.predict(row)  # closed here
        """
        self._model = None
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def certified_model(loaded: LoadedModel) -> CertifiedModel:
    """Return the model behind the answers. Raises UnavailableError once it is closed."""
    if loaded._model is None:
        raise UnavailableError("this model is closed. Load it again with slipway.load.")
    return loaded._model


def load(
    path: str | os.PathLike[str] = ".",
    *,
    provider: ProviderOption = "auto",
    variant: Variant = "auto",
    num_threads: int = 0,
) -> LoadedModel:
    """Load the certified model of a project, of its `artifacts` or of a bundle.

    `provider`, `variant` and `num_threads` (0: every core) mean the same as SLIPWAY_PROVIDER,
    SLIPWAY_VARIANT and SLIPWAY_NUM_THREADS. Raises SlipwayError if a file was altered or no
    certificate fits. Missed quality gates are not an error here: `info` shows the verdict.

    >>> with slipway.load("my_project", num_threads=2) as model:
    ...     model.info()["gates"]
    'passed'
    """
    bundle = find_bundle(Path(path))
    beside, project = bundle.parent, bundle.parent.parent
    if (project / "transforms").is_dir() and str(project.absolute()) not in sys.path:
        sys.path.insert(0, str(project.absolute()))  # the bundle may name a function there
    options = ModelOptions(
        bundle=bundle,
        certificate=beside / "certificate.json",
        engine=beside / "engine",
        rebuilt_engine=beside / "rebuilt_engine",
        engine_cache=project / ".work/engine_cache",
        num_threads=num_threads or num_cores(),
        may_use_one_thread=num_threads == 0,
        provider=provider,
        variant=variant,
        accept_missed_gates=True,
    )
    return LoadedModel(open_model(options))


def find_bundle(path: Path) -> Path:
    """Return the folder of the bundle: `path`, its `bundle` or its `artifacts/bundle`."""
    for place in (path, path / "bundle", path / "artifacts/bundle"):
        if (place / MANIFEST).is_file():
            return place.absolute()
    found = "is not a folder" if not path.is_dir() else "holds no model"
    raise BundleError(
        f"{str(path)!r} {found}: expected a project whose stages ran, its `artifacts`, or a bundle "
        f"with its {MANIFEST}. Run `slipway run`, or correct the path."
    )
