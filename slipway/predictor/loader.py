"""Loads a model: a verified bundle, its certificate, and a warm runner.

`open_model` succeeds completely or raises. Before it returns, the model has run batches of every
power of two, its outputs met the bundle's output contract, and its answers to the golden rows
agreed with those of the fp32 graph.
"""

from dataclasses import replace
from pathlib import Path
from time import thread_time
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import Bundle, LoadedBundle, load_bundle
from slipway.artifacts.certificate import Certificate, check_certificate, read_certificate
from slipway.artifacts.signature import require_signer
from slipway.artifacts.uncertainty import Answers
from slipway.predictor.batches import Run, next_power_of_two, padded
from slipway.predictor.model import CertifiedModel, InvalidAnswerError
from slipway.predictor.options import DEFAULT_BATCH_SIZE, ModelOptions
from slipway.predictor.selection import select
from slipway.runtimes.rebuild import answer_golden_rows
from slipway.system.errors import BundleError

# Quicker batches run in the event loop: a thread adds 0.2 to 0.5 ms, and up to 5 ms if it is busy.
QUICK_S = 0.001
_NUM_TIMED = 3


def open_model(
    options: ModelOptions, certified: tuple[LoadedBundle, Certificate] | None = None
) -> CertifiedModel:
    """Verify a bundle, select a runtime, load the model and warm it up.

    `certified` is the result of `read_certified`, if the caller has it already. Raises SlipwayError
    with the reason if the model must not or cannot run.
    """
    bundle, certificate = certified or read_certified(
        options.bundle,
        options.certificate,
        accept_draft=options.accept_draft,
        accept_missed_gates=options.accept_missed_gates,
    )
    if options.signers or options.signer_list:
        require_signer(options.bundle, options.certificate, options.signers, options.signer_list)
    bundle.manifest.input.require_usable()  # after the certificate, because it runs code
    max_batch_size = _max_batch_size(options, bundle.manifest)
    model = _open_warm(options, bundle, certificate, max_batch_size)
    has_threads = options.may_use_one_thread and options.num_threads > 1
    if model.quick_rows == max_batch_size and has_threads:
        # For batches this quick, waking another thread takes longer than it saves.
        single = replace(options, num_threads=1)
        single_threaded = _open_warm(single, bundle, certificate, max_batch_size)
        if single_threaded.quick_rows == max_batch_size:
            model = single_threaded
    variant = model.selection.actual.variant
    golden_rows = answer_golden_rows(model.run, variant, bundle, max_batch_size)
    return replace(model, golden_rows=golden_rows)


def _open_warm(
    options: ModelOptions, bundle: LoadedBundle, certificate: Certificate, max_batch_size: int
) -> CertifiedModel:
    """Select and load a certified runner, and warm it up with each batch size.

    Does not check the golden rows; `open_model` does that afterwards.
    """
    selection = select(options, bundle, certificate)
    is_on_cpu = selection.actual.provider == "cpu"
    run = selection.runner.run if is_on_cpu else padded(selection.runner.run, max_batch_size)
    quick_rows = _warm_up(run, bundle.manifest, max_batch_size)
    if not is_on_cpu:
        quick_rows = 0  # a GPU never runs in the event loop, which would wait for it
    return CertifiedModel(
        bundle, certificate, selection, max_batch_size, run, None, options.num_threads, quick_rows
    )


def read_certified(
    bundle_root: Path,
    certificate_path: Path,
    *,
    accept_draft: bool,
    accept_missed_gates: bool = False,
) -> tuple[LoadedBundle, Certificate]:
    """Read and verify a bundle and its certificate.

    Raises BundleError if they do not match, GateMissedError if the model missed a quality gate.
    """
    bundle = load_bundle(bundle_root)
    bundle.verify()
    certificate = read_certificate(certificate_path)
    check_certificate(
        certificate, bundle, accept_draft=accept_draft, accept_missed_gates=accept_missed_gates
    )
    return bundle, certificate


def _max_batch_size(options: ModelOptions, manifest: Bundle) -> int:
    if options.max_batch_size == "auto":
        return min(DEFAULT_BATCH_SIZE, manifest.max_batch_size)
    if options.max_batch_size > manifest.max_batch_size:
        raise BundleError(
            f"SLIPWAY_MAX_BATCH_SIZE is {options.max_batch_size}, the bundle takes at most "
            f"{manifest.max_batch_size}. Lower the setting, or raise export.max_batch_size and "
            "export again."
        )
    return options.max_batch_size


def _warm_up(run: Run, manifest: Bundle, max_batch_size: int) -> int:
    """Run batches of each power of two up to `max_batch_size`, and check their outputs.

    Returns the largest batch, in rows, that runs within QUICK_S; 0 if not even one row does.
    """
    size, quick_rows, is_quick = 1, 0, True
    while True:
        num_rows = min(size, max_batch_size)
        batch = manifest.input.example_rows(num_rows)
        try:
            answers = run(batch)
        except Exception as error:
            message = f"the model refuses {batch.shape} {batch.dtype}, which its bundle declares"
            raise BundleError(f"{message}: {error}") from error
        _check_answers(answers, num_rows, manifest)
        is_quick = is_quick and min(_seconds(run, batch) for _ in range(_NUM_TIMED)) <= QUICK_S
        if is_quick:
            quick_rows = num_rows
        if size >= next_power_of_two(max_batch_size):
            return quick_rows
        size *= 2


def _seconds(run: Run, batch: NDArray[Any]) -> float:
    """Run a batch and return the processor time of this thread in seconds.

    A wall clock would include the time of a busy event loop.
    """
    started = thread_time()
    run(batch)
    return thread_time() - started


def _check_answers(answers: Answers, num_rows: int, manifest: Bundle) -> None:
    outputs, scores = answers
    expected = [(num_rows, max(1, len(manifest.output.labels))), (num_rows,)]
    if [outputs.shape, scores.shape] != expected:
        raise InvalidAnswerError(
            f"in warm-up the model answered {outputs.shape} and scores {scores.shape}, its bundle "
            f"declares {expected[0]} and {expected[1]}. Run `dvc repro export`."
        )
    if not (np.isfinite(outputs).all() and np.isfinite(scores).all()):
        raise InvalidAnswerError(
            "in warm-up the model answered NaN or an infinity. Run `dvc repro export`, and see the "
            "report of `verify`."
        )
    wrong = ""
    match manifest.output.kind:
        case "probabilities":
            # Softmax in half precision is off by up to about 1e-3.
            if not np.allclose(outputs.sum(axis=1), 1, atol=5e-3):
                wrong = "do not sum to 1"
        case "label_probabilities":
            if not ((outputs >= 0) & (outputs <= 1)).all():
                wrong = "are not between 0 and 1"
        case "value":
            pass
        case kind:
            assert_never(kind)
    if wrong:
        raise InvalidAnswerError(
            f"in warm-up the model's probabilities {wrong}. Run `dvc repro export`."
        )
