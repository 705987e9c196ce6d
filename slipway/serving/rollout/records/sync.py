"""Syncs with the rollout that several services share, on a thread of one worker at a time.

Every second it adds the entries that wait in this service, stores the reports of this service's
workers, and copies the state, the models that it names and the other services' reports to
SLIPWAY_STATE. Workers reconcile with that copy as without a database. While the database is down
they keep serving it.
"""

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from slipway.serving.process.rounds import Rounds
from slipway.serving.rollout.records.database import (
    TABLES,
    apply,
    exchange_reports,
    missing_models,
    read_others,
    settle,
    shared_transaction,
)
from slipway.serving.rollout.records.model_files import (
    fetch,
    models_of,
    publish,
    published_folders,
    remove_unnamed,
)
from slipway.serving.rollout.reports import write_others
from slipway.serving.rollout.state import FILE, Rollout, RolloutError, read_rollout
from slipway.serving.rollout.store import command_lock
from slipway.system import files
from slipway.traffic.postgres import ROLLOUT, SharedDatabase, given_url

logger = logging.getLogger("bentoml.slipway")

_LIMIT_S = 30.0  # time limit of a transaction
_TIDY_S = 600.0
_LOCK = "sync.lock"


def sync(folder: Path, *, is_locked: bool = False) -> None:
    """Copy the shared state to this service, before a command or before the first model loads.

    Does nothing without SLIPWAY_DATABASE_URL. Raises UnavailableError if the database is down.

    Args:
        is_locked: the caller holds `command_lock`.
    """
    url = given_url()
    if url is None:
        return
    files.make_private_directory(folder)  # this may precede the service's first start
    with shared_transaction(url) as connection:
        rollout, waiting = apply(connection, folder, lambda now: now)
        write_others(folder, read_others(connection, folder, rollout))
    _fetch_missing(url, folder, rollout, is_locked=is_locked)
    settle(folder, rollout, waiting)


def _fetch_missing(url: str, folder: Path, rollout: Rollout, *, is_locked: bool) -> None:
    missing = missing_models(folder, rollout)
    if not missing:
        return
    # The lock keeps commands from removing a model that the state here does not name yet.
    with nullcontext() if is_locked else command_lock(folder):
        for model in models_of(rollout):
            if model.folder in missing:
                fetch(url, folder, model)


class RolloutSync:
    """The thread that syncs with the shared rollout; `report_fault` counts a failed round."""

    def __init__(self, state: Path, report_fault: Callable[[], None]) -> None:
        self._state = state
        url = given_url()
        assert url is not None
        self._url = url
        self._database = SharedDatabase(url, TABLES, ROLLOUT)
        self._was_seen = False
        self._last_event = read_rollout(state).num_events
        self._tidied = time.monotonic()
        self.rounds = Rounds(  # the last one reports that this worker ends
            "slipway-rollout-sync",
            self.work_once,
            report_fault,
            self._database.close,
            failing="cannot follow the rollout in SLIPWAY_DATABASE_URL; the models in use continue "
            "to serve, and commands are refused",
            working="the rollout in SLIPWAY_DATABASE_URL is followed again",
        )

    def work_once(self) -> None:
        """Exchange state and reports with the database once.

        Raises LockedError if another worker does.
        """
        with files.lock(self._state / _LOCK, "an exchange with SLIPWAY_DATABASE_URL"):
            with self._database.transaction(_LIMIT_S) as connection:
                rollout, waiting = apply(connection, self._state, lambda now: now)
                others = exchange_reports(connection, self._state, rollout, was_seen=self._was_seen)
                published = published_folders(connection)
            self._was_seen = True
            write_others(self._state, others)
            self._publish_missing(rollout, published)
            self._require_newer(rollout)
            _fetch_missing(self._url, self._state, rollout, is_locked=False)
            settle(self._state, rollout, waiting)
            self._log_events(rollout)
            if time.monotonic() - self._tidied > _TIDY_S:
                remove_unnamed(self._url, rollout)
                self._tidied = time.monotonic()

    def _publish_missing(self, rollout: Rollout, published: set[str]) -> None:
        """Upload the state's models that only this service has, such as older ones."""
        missing = missing_models(self._state, rollout) | published
        for model in models_of(rollout):
            if model.folder not in missing:
                publish(self._url, self._state, model)

    def _require_newer(self, rollout: Rollout) -> None:
        own = read_rollout(self._state)
        if own.revision > rollout.revision:
            raise RolloutError(
                f"the rollout in SLIPWAY_DATABASE_URL has revision {rollout.revision}, and "
                f"{self._state / FILE} has {own.revision}, expected no older one: was the database "
                "restored? Remove the file to follow the database."
            )

    def _log_events(self, rollout: Rollout) -> None:
        """Log events that another service recorded.

        Only that service counts them in its metrics.
        """
        for event in rollout.events:
            if event.number > self._last_event:
                what = event.what.replace("_", " ")
                logger.info("shared rollout: model %s %s: %s", event.model, what, event.reason)
        self._last_event = max(self._last_event, rollout.num_events)
