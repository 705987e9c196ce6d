"""A real PostgreSQL that tests start, kill, pause and fill."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.serving.server import free_port, until

_USER = "postgres"


def _program(name: str) -> str:
    """Return the path of a PostgreSQL program, which Debian does not put into PATH."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return shutil.which(name) or next((str(one / name) for one in folders), "")


def require_postgres() -> None:
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    if not Path(_program("initdb")).is_file():
        pytest.skip("PostgreSQL is not installed (apt-get install postgresql)")


class Postgres:
    """A PostgreSQL cluster in `folder`, on a port of 127.0.0.1, open to any local user."""

    def __init__(self, folder: Path) -> None:
        self.data, self.port = folder / "data", free_port()
        self.url = f"postgresql://{_USER}@127.0.0.1:{self.port}/postgres"
        # PostgreSQL refuses to run as root.
        self._user: dict[str, Any] = (
            {"user": _USER, "group": _USER, "extra_groups": []} if os.geteuid() == 0 else {}
        )
        if self._user:
            shutil.chown(folder, _USER)
        self._process: subprocess.Popen[bytes] | None = None
        options = ["--auth=trust", "--no-sync", "--username", _USER, "--locale=C"]
        options.append("--encoding=UTF8")
        subprocess.run(
            [_program("initdb"), *options, str(self.data)],
            check=True,
            capture_output=True,
            cwd="/",
            **self._user,
        )

    def start(self) -> None:
        options = {"listen_addresses": "127.0.0.1", "unix_socket_directories": "", "fsync": "off"}
        options |= {"shared_buffers": "1MB", "max_connections": "20", "autovacuum": "off"}
        with (self.data / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [_program("postgres"), "-D", str(self.data), "-p", str(self.port)]
                + [f"--{name}={value}" for name, value in options.items()],
                cwd="/",
                stdout=log,
                stderr=log,
                **self._user,
            )
        until(self.answers)

    def answers(self) -> bool:
        import psycopg

        try:
            psycopg.connect(self.url, connect_timeout=2).close()
        except psycopg.Error:
            return False
        return True

    def fetch(self, query: str) -> list[tuple[Any, ...]]:
        import psycopg

        with psycopg.connect(self.url) as connection:
            return connection.execute(query.encode()).fetchall()

    def send(self, number: signal.Signals) -> None:
        """Send the signal `number` to all processes of the cluster."""
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text()
        for process in [self._process.pid, *map(int, children.split())]:
            os.kill(process, number)

    def stop(self, number: signal.Signals = signal.SIGKILL) -> None:
        if self._process is not None:
            self.send(number)
            self._process.wait()
            self._process = None


@contextmanager
def cluster(parent: Path | None = None) -> Iterator[Postgres]:
    """Start a cluster, and end it; the test is skipped without PostgreSQL.

    pytest's own folders belong to one user, so that PostgreSQL's may not enter them.
    """
    require_postgres()
    folder = Path(tempfile.mkdtemp(prefix="slipway-postgres-", dir=parent))
    found = Postgres(folder)
    try:
        found.start()
        yield found
    finally:
        found.stop()
        shutil.rmtree(folder)


@contextmanager
def small_cluster() -> Iterator[tuple[Postgres, Path]]:
    """Start a cluster on a disk of 80 MB, and return both; skipped without the right to mount."""
    disk = Path(tempfile.mkdtemp(prefix="slipway-disk-"))
    mount = ["mount", "-t", "tmpfs", "-o", "size=80m,mode=755", "none", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        disk.rmdir()
        pytest.skip("no right to mount a file system here")
    try:
        with cluster(disk) as postgres:
            yield postgres, disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
        disk.rmdir()


@contextmanager
def filled(disk: Path) -> Iterator[None]:
    """Fill `disk` completely during the block."""
    filler = disk / "filler"
    with filler.open("wb") as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
            file.flush()
    try:
        yield
    finally:
        filler.unlink()
