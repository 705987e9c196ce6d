"""Copies rolled-out models to SLIPWAY_STATE/models, with bundle, certificate and engine.

The service only loads copies of rolled-out models, so a `dvc repro` that rewrites artifacts/ cannot
change the files of a worker that restarts. A copy contains only files whose digest was verified,
or all files of the folder if it has a signature, which covers them; it never changes.
"""

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipway.artifacts.bundle import MANIFEST
from slipway.artifacts.engine_manifest import ENGINE_MANIFEST
from slipway.artifacts.signature import SIGNATURE
from slipway.predictor.loader import read_certified
from slipway.serving.rollout.state import Model, RolloutError, read_rollout
from slipway.serving.settings import Settings
from slipway.system import files
from slipway.system.errors import BundleError, LockedError

BUNDLE, CERTIFICATE, ENGINE = "bundle", "certificate.json", "engine"
_LOCK = "command.lock"
_PRUNING_S = 1.0  # longest wait for a running removal of copies, which takes less
_threads = threading.Lock()  # the file lock excludes other processes only


def copy_folder(state: Path, model: Model) -> Path:
    """Return the folder in SLIPWAY_STATE that holds the copy of a rolled-out model."""
    return state / "models" / model.folder


def rehearsal_mark(state: Path, model: Model) -> Path:
    """Return the path of the empty file that marks a copy as loaded once successfully."""
    return copy_folder(state, model) / "tried"


def add_model(
    state: Path, bundle: Path, certificate: Path, engine: Path | None, *, is_shadow: bool = False
) -> Model:
    """Copy a certified bundle and its engine, unless the copy exists.

    Raises BundleError or CertificateError if their digests do not match, and GateMissedError if the
    model missed its quality gates and is not a shadow.
    """
    loaded, read = read_certified(
        bundle, certificate, accept_draft=False, accept_missed_gates=is_shadow
    )
    signature = bundle / SIGNATURE
    digests = [files.sha256_file(path)[:8] for path in (certificate, signature) if path.is_file()]
    model = Model(
        folder="-".join([loaded.version, *digests]),
        version=loaded.version,
        digest=loaded.digest,
    )
    place = copy_folder(state, model)
    if place.exists():
        return model
    with files.new_directory(place) as folder:
        (folder / BUNDLE).mkdir()
        # A signature covers every file of the folder.
        every_file = [path.name for path in bundle.iterdir() if path.is_file()]
        for name in every_file if signature.is_file() else loaded.file_names:
            shutil.copyfile(bundle / name, folder / BUNDLE / name)
        shutil.copyfile(certificate, folder / CERTIFICATE)
        has_engine = engine is not None and (engine / ENGINE_MANIFEST).exists()
        if engine is not None and has_engine and read.engine_digest is not None:
            shutil.copytree(engine, folder / ENGINE)
        # The original may have changed during the copy.
        copied, _ = read_certified(
            folder / BUNDLE,
            folder / CERTIFICATE,
            accept_draft=False,
            accept_missed_gates=is_shadow,
        )
        if copied.digest != loaded.digest:
            raise BundleError(
                f"{bundle / MANIFEST} changed while it was being copied. "
                "Try again when no process writes to it."
            )
    return model


def settings_of(settings: Settings, model: Model | None) -> Settings:
    """Return the settings with the model's copy in place of SLIPWAY_BUNDLE; unchanged for None.

    Raises RolloutError if the copy does not exist.
    """
    if model is None:
        return settings
    place = copy_folder(settings.state, model)
    if not place.exists():
        raise RolloutError(
            f"{settings.state / 'rollout.json'} names {place}, which does not exist. "
            "Deploy a bundle, or return to SLIPWAY_BUNDLE: python -m slipway.serving.rollout reset"
        )
    return settings.model_copy(
        update={
            "bundle": place / BUNDLE,
            "certificate": place / CERTIFICATE,
            "engine": place / ENGINE,
        }
    )


def prune_models(state: Path) -> None:
    """Remove the copies of models that the state does not name.

    Call it only within `command_lock`, because a new copy is not in the state yet.
    """
    named = read_rollout(state).folders
    for place in (state / "models").glob("*"):
        if place.is_dir() and place.name not in named:
            files.remove_directory(place)


def prune_unless_locked(state: Path) -> None:
    """Call `prune_models`, unless a command is running: it will prune the copies at its end."""
    if not _threads.acquire(blocking=False):
        return
    try:
        with files.lock(state / _LOCK, "a rollout command"):
            prune_models(state)
    except LockedError:
        return
    finally:
        _threads.release()


@contextmanager
def command_lock(state: Path) -> Iterator[None]:
    """Run one command at a time. Raises LockedError while another one runs, in any process."""
    if not _threads.acquire(timeout=_PRUNING_S):
        raise LockedError(
            f"a rollout command is already running as process {os.getpid()} "
            f"(lock file {state / _LOCK}). Wait until it ends."
        )
    try:
        files.make_private_directory(state)  # a command may precede the service's first start
        with files.lock(state / _LOCK, "a rollout command"):
            yield
    finally:
        _threads.release()
