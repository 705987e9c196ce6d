"""Copies the files of rolled-out models between services, through their database.

Services on one database may share no disk, so the database also holds the copies of the models that
its rollout names: each file once by its SHA-256, in parts of 4 MiB. A service that gets a model
checks every digest, and loads it like a copy of its own: bundle, certificate and signature decide.
"""

import hashlib
import json
from pathlib import Path

from slipway.serving.rollout.records.database import database_time, shared_transaction
from slipway.serving.rollout.state import Model, Rollout, RolloutError
from slipway.serving.rollout.store import copy_folder, rehearsal_mark
from slipway.system import files
from slipway.traffic.postgres import SqlConnection

_PART_BYTES = 4 << 20
_UNNAMED_S = 3600.0  # an unnamed model stays so long: a command may be about to name it


def models_of(rollout: Rollout) -> list[Model]:
    """Return the models that the state names, each once."""
    candidate = (rollout.candidate.model, rollout.candidate.replaces) if rollout.candidate else ()
    named = (rollout.stable, *rollout.history, *candidate)
    return list({model.folder: model for model in named if model}.values())


def published_folders(connection: SqlConnection) -> set[str]:
    """Return the folders of the models that the database has."""
    return {folder for (folder,) in connection.execute("SELECT folder FROM models").fetchall()}


def publish(url: str, state: Path, model: Model) -> None:
    """Upload the copy of a model, unless the database has it or this service does not."""
    place, mark = copy_folder(state, model), rehearsal_mark(state, model)
    with shared_transaction(url) as connection:
        # The new time keeps the model until the state names it.
        is_known = connection.execute(
            "UPDATE models SET added = ? WHERE folder = ? RETURNING folder",
            (database_time(connection), model.folder),
        ).fetchone()
    if is_known or not place.exists():
        return
    paths = [path for path in sorted(place.rglob("*")) if path.is_file() and path != mark]
    digests = {path: files.sha256_file(path) for path in paths}
    named = {path.relative_to(place).as_posix(): digest for path, digest in digests.items()}
    is_listed = False
    while not is_listed:  # meanwhile another service may remove a file that an older model had
        for path, digest in digests.items():
            _upload(url, path, digest)
        with shared_transaction(url) as connection:
            counted = connection.execute("SELECT sha256, count(*) FROM parts GROUP BY sha256")
            found = dict(counted.fetchall())
            is_listed = all(
                found.get(digest, 0) == -(-path.stat().st_size // _PART_BYTES)
                for path, digest in digests.items()
            )
            if is_listed:
                connection.execute(
                    "INSERT INTO models VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
                    (model.folder, database_time(connection), json.dumps(named)),
                )
                for digest in digests.values():
                    connection.execute("DELETE FROM uploads WHERE sha256 = ?", (digest,))


def _upload(url: str, path: Path, digest: str) -> None:
    with path.open("rb") as file:
        for part, content in enumerate(iter(lambda: file.read(_PART_BYTES), b"")):
            with shared_transaction(url) as connection:  # short, so that others take turns
                connection.execute(
                    "INSERT INTO uploads VALUES (?, ?) "
                    "ON CONFLICT (sha256) DO UPDATE SET seen = excluded.seen",
                    (digest, database_time(connection)),
                )
                connection.execute(
                    "INSERT INTO parts VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
                    (digest, part, content),
                )


def fetch(url: str, state: Path, model: Model) -> None:
    """Download a model. Raises RolloutError if the database lacks it or a digest differs."""
    place = copy_folder(state, model)
    with shared_transaction(url) as connection:
        row = connection.execute(
            "SELECT files FROM models WHERE folder = ?", (model.folder,)
        ).fetchone()
    if row is None:
        raise RolloutError(
            f"SLIPWAY_DATABASE_URL has no files of model {model.version}, which the rollout names. "
            "Start the service that proposed it, or propose it again."
        )
    with files.new_directory(place) as folder:
        for name, digest in json.loads(row[0]).items():
            path = folder / name
            if not path.resolve().is_relative_to(folder.resolve()):
                raise RolloutError(
                    f"model {model.version} names the file {name!r}, which is outside its folder. "
                    "The record in SLIPWAY_DATABASE_URL is damaged: propose the model again."
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            found = _fetch_file(url, path, digest)
            if found != digest:
                _discard(url, model, digest)
                raise RolloutError(
                    f"{name} of model {model.version} in SLIPWAY_DATABASE_URL has the SHA-256 "
                    f"{found}, expected {digest}: it was changed, and is discarded. A running "
                    "service with this model uploads it again; otherwise propose the model again "
                    "from its bundle."
                )


def _discard(url: str, model: Model, digest: str) -> None:
    """Remove a damaged file and the entry of its model, so that it can be uploaded again."""
    with shared_transaction(url) as connection:
        connection.execute("DELETE FROM models WHERE folder = ?", (model.folder,))
        connection.execute("DELETE FROM parts WHERE sha256 = ?", (digest,))


def _fetch_file(url: str, path: Path, digest: str) -> str:
    """Write the parts of a file to `path`. Returns the SHA-256 of its content."""
    found = hashlib.sha256()
    with path.open("wb") as file:
        for part in range(1 << 31):
            with shared_transaction(url) as connection:
                row = connection.execute(
                    "SELECT content FROM parts WHERE sha256 = ? AND part = ?", (digest, part)
                ).fetchone()
            if row is None:
                break
            found.update(row[0])
            file.write(row[0])
    return found.hexdigest()


def remove_unnamed(url: str, rollout: Rollout) -> None:
    """Remove the models that the rollout does not name, and files whose upload was cut off."""
    with shared_transaction(url) as connection:
        now, kept, gone = database_time(connection), set[str](), set[str]()
        for folder, added, text in connection.execute("SELECT * FROM models").fetchall():
            digests = json.loads(text).values()
            if folder in rollout.folders or now - added < _UNNAMED_S:
                kept.update(digests)
            else:
                gone.update(digests)
                connection.execute("DELETE FROM models WHERE folder = ?", (folder,))
        cut_off = connection.execute(
            "DELETE FROM uploads WHERE seen < ? RETURNING sha256", (now - _UNNAMED_S,)
        )
        gone.update(digest for (digest,) in cut_off.fetchall())
        for digest in gone - kept:
            connection.execute("DELETE FROM parts WHERE sha256 = ?", (digest,))
