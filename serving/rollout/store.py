"""Copies of what is rolled out, SLIPWAY_STATE/models/VERSION-SEAL: bundle, certificate and, if there is one, engine.

The service loads copies alone, so that a `dvc repro` that rewrites artifacts/ pulls no file from under a worker that starts again.
Only bytes whose digest was checked are in a copy, and a copy never changes.
"""

import os
import shutil
import threading
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path

from serving.models.loading import read_certified
from serving.rollout.state import Model, RolloutError, read_rollout
from serving.settings import Settings
from slipway.artifacts.bundle import MANIFEST
from slipway.artifacts.engine_manifest import ENGINE_MANIFEST
from slipway.system import files
from slipway.system.errors import BundleError, LockedError

BUNDLE, CERTIFICATE, ENGINE, TRIED = "bundle", "certificate.json", "engine", "tried"
_LOCK = "command.lock"
_PRUNING_S = 1.0  # longer than it takes
_threads = threading.Lock()  # the lock of files keeps out other processes only


def add_model(
    state: Path, bundle: Path, certificate: Path, engine: Path | None, *, is_shadow: bool = False
) -> Model:
    """Copy a certified bundle, and its engine.

    BundleError or CertificateError if they do not go together, to the last bit; GateMissedError if
    the model did not pass its quality gates and is to do more than to shadow. A copy that is there
    already is kept.
    """
    loaded, read = read_certified(
        bundle, certificate, accept_draft=False, accept_missed_gates=is_shadow
    )
    model = Model(
        folder=f"{loaded.version}-{files.sha256_file(certificate)[:8]}",
        version=loaded.version,
        digest=loaded.digest,
    )
    place = state / "models" / model.folder
    if place.exists():
        return model
    with files.new_directory(place) as folder:
        (folder / BUNDLE).mkdir()
        for name in loaded.file_names:
            shutil.copyfile(bundle / name, folder / BUNDLE / name)
        shutil.copyfile(certificate, folder / CERTIFICATE)
        if (
            read.engine_digest is not None
            and engine is not None
            and (engine / ENGINE_MANIFEST).exists()
        ):
            shutil.copytree(engine, folder / ENGINE)
        # It may have changed under our hands.
        copied, _ = read_certified(
            folder / BUNDLE,
            folder / CERTIFICATE,
            accept_draft=False,
            accept_missed_gates=is_shadow,
        )
        if copied.digest != loaded.digest:
            raise BundleError(
                f"{bundle / MANIFEST} changed while it was copied. Try again when nothing writes there."
            )
    return model


def settings_of(settings: Settings, model: Model | None) -> Settings:
    """The settings with the model's copy in place of SLIPWAY_BUNDLE; as they are for None. RolloutError if the copy is gone."""
    if model is None:
        return settings
    place = settings.state / "models" / model.folder
    if not place.exists():
        raise RolloutError(
            f"{place} is gone, which {settings.state / 'rollout.json'} names. "
            "Deploy a bundle, or return to SLIPWAY_BUNDLE: python -m serving.rollout reset"
        )
    return settings.model_copy(
        update={
            "bundle": place / BUNDLE,
            "certificate": place / CERTIFICATE,
            "engine": place / ENGINE,
        }
    )


def is_tried(state: Path, model: Model) -> bool:
    """Whether this copy was once loaded in a process of its own."""
    return (state / "models" / model.folder / TRIED).exists()


def note_tried(state: Path, model: Model) -> None:
    """It was."""
    files.write_bytes(state / "models" / model.folder / TRIED, b"")


def prune_models(state: Path, named: Set[str]) -> None:
    """Remove the copies that are not `named`. Only under `commanding`: a copy that was just made is not named yet."""
    for place in (state / "models").glob("*"):
        if place.is_dir() and place.name not in named:
            files.remove_directory(place)


def prune_unless_commanding(state: Path) -> None:
    """Remove the copies that the state does not name, or leave it to the command that is running."""
    if not _threads.acquire(blocking=False):
        return
    try:
        with files.lock(state / _LOCK, "a rollout command"):
            prune_models(state, read_rollout(state).models)
    except LockedError:
        return
    finally:
        _threads.release()


@contextmanager
def commanding(state: Path) -> Iterator[None]:
    """One command at a time; LockedError if another one has the turn, in this process or in another: it may take minutes."""
    if not _threads.acquire(timeout=_PRUNING_S):
        raise LockedError(
            f"a rollout command is already running as process {os.getpid()} (lock file {state / _LOCK}). Wait for it."
        )
    try:
        files.make_private_directory(state)  # the command may come before the service's first start
        with files.lock(state / _LOCK, "a rollout command"):
            yield
    finally:
        _threads.release()
