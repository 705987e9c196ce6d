"""Loads the model that is served: a bundle whose every byte was checked, a certificate that fits it, and a warm runner.

`load_model` does it all or raises; there is no half-loaded model. Nothing is served before every batch
size that will run has run once and answered what the bundle's output contract says, and before the bundle's golden rows
were answered as fp32 answers them.
"""

from dataclasses import replace
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.models.batching import Run, next_power_of_two, padded
from serving.models.model import InvalidAnswerError, ServedModel
from serving.models.selection import select
from serving.settings import DEFAULT_BATCH_SIZE, Settings
from slipway.artifacts.bundle import Bundle, LoadedBundle, load_bundle
from slipway.artifacts.certificate import Certificate, check_certificate, read_certificate
from slipway.artifacts.uncertainty import Answers
from slipway.runtimes.rebuild import answer_golden_rows
from slipway.system.errors import BundleError

QUICK_S = 0.001  # a batch on a thread takes 0.2 to 0.5 ms longer than its model, and up to 5 ms where the interpreter is busy
_NUM_TIMED = 3


def load_model(
    settings: Settings, certified: tuple[LoadedBundle, Certificate] | None = None
) -> ServedModel:
    """Check, select, load and warm up. A SlipwayError says why that is not possible. `certified`: what `read_certified` gave already."""
    bundle, certificate = certified or read_certified(
        settings.bundle, settings.certificate, accept_draft=settings.accept_draft
    )
    bundle.manifest.input.require_usable()  # after the certificate: it runs code
    max_batch_size = _max_batch_size(settings, bundle.manifest)
    model = _open_warm(settings, bundle, certificate, max_batch_size)
    if (
        model.quick_rows == max_batch_size
        and settings.num_threads == 0
        and settings.threads_per_worker() > 1
    ):
        # To wake another thread for a batch this quick takes longer than that thread saves.
        alone = _open_warm(
            settings.model_copy(update={"num_threads": 1}), bundle, certificate, max_batch_size
        )
        model = alone if alone.quick_rows == max_batch_size else model
    return replace(
        model,
        settings=settings,
        golden_rows=answer_golden_rows(
            model.run, model.selection.actual.variant, bundle, max_batch_size
        ),
    )


def _open_warm(
    settings: Settings, bundle: LoadedBundle, certificate: Certificate, max_batch_size: int
) -> ServedModel:
    """A possible and certified runner, warmed up with each batch size, before its golden rows."""
    selection = select(settings, bundle, certificate)
    is_on_cpu = selection.actual.provider == "cpu"
    run = selection.runner.run if is_on_cpu else padded(selection.runner.run, max_batch_size)
    quick_rows = _warm_up(run, bundle.manifest, max_batch_size)
    if not is_on_cpu:
        quick_rows = 0  # the event loop does not wait for a GPU
    return ServedModel(
        bundle, certificate, selection, max_batch_size, run, None, settings, quick_rows
    )


def read_certified(
    bundle_root: Path,
    certificate_path: Path,
    *,
    accept_draft: bool,
    accept_missed_gates: bool = False,
) -> tuple[LoadedBundle, Certificate]:
    """A bundle whose every file was checked, with the certificate that speaks of it.

    BundleError if they do not go together, GateMissedError if the model's gates forbid its release.
    """
    bundle = load_bundle(bundle_root)
    bundle.verify()
    certificate = read_certificate(certificate_path)
    check_certificate(
        certificate, bundle, accept_draft=accept_draft, accept_missed_gates=accept_missed_gates
    )
    return bundle, certificate


def _max_batch_size(settings: Settings, manifest: Bundle) -> int:
    if settings.max_batch_size == "auto":
        return min(DEFAULT_BATCH_SIZE, manifest.max_batch_size)
    if settings.max_batch_size > manifest.max_batch_size:
        raise BundleError(
            f"SLIPWAY_MAX_BATCH_SIZE is {settings.max_batch_size}, the bundle takes at most {manifest.max_batch_size}. "
            f"Lower the setting, or raise export.max_batch_size and export again."
        )
    return settings.max_batch_size


def _warm_up(run: Run, manifest: Bundle, max_batch_size: int) -> int:
    """Run each power of two up to the one that holds the largest batch, and check the form of the answers. The largest that is quick."""
    size, quick_rows, is_quick = 1, 0, True
    while True:
        num_rows = min(size, max_batch_size)
        batch = manifest.input.example_rows(num_rows)
        try:
            answers = run(batch)
        except Exception as error:
            raise BundleError(
                f"the model does not take {batch.shape} {batch.dtype}, as its bundle says: {error}"
            ) from error
        _check_answers(answers, num_rows, manifest)
        is_quick = is_quick and min(_seconds(run, batch) for _ in range(_NUM_TIMED)) <= QUICK_S
        if is_quick:
            quick_rows = num_rows
        if size >= next_power_of_two(max_batch_size):
            return quick_rows
        size *= 2


def _seconds(run: Run, batch: NDArray[Any]) -> float:
    """Of this thread's processor time: beside a busy event loop, as when a model is swapped under load, the clock would tell of that."""
    started = thread_time()
    run(batch)
    return thread_time() - started


def _check_answers(answers: Answers, num_rows: int, manifest: Bundle) -> None:
    outputs, scores = answers
    is_value = manifest.output.kind == "value"
    expected = [(num_rows, 1 if is_value else len(manifest.output.labels)), (num_rows,)]
    if [outputs.shape, scores.shape] != expected:
        found = f"{outputs.shape} and scores {scores.shape}, its bundle says {expected[0]} and {expected[1]}"
        raise InvalidAnswerError(f"in warm-up the model answered {found}. Run `dvc repro export`.")
    if not (np.isfinite(outputs).all() and np.isfinite(scores).all()):
        raise InvalidAnswerError(
            "in warm-up the model answered NaN or an infinity. Run `dvc repro export`, and see what `verify` says."
        )
    # Softmax in half precision is off by up to about 1e-3.
    if not is_value and not np.allclose(outputs.sum(axis=1), 1, atol=5e-3):
        raise InvalidAnswerError(
            "in warm-up the model's probabilities do not sum to 1. Run `dvc repro export`."
        )
