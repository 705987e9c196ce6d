"""Atomic writes, digests and locks, with real processes where they matter."""

import errno
import hashlib
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from slipway.system import files
from slipway.system.errors import IntegrityError, LockedError

# A number that no process has: the largest is 2**22 on Linux.
DEAD = 2**22 + 1


def test_sha256_functions_agree_with_hashlib(tmp_path: Path) -> None:
    payload = os.urandom(3_000_000)
    (tmp_path / "a").write_bytes(payload)
    assert (
        files.sha256_file(tmp_path / "a")
        == files.sha256_bytes(payload)
        == hashlib.sha256(payload).hexdigest()
    )


def test_read_verified_returns_the_hashed_bytes_or_refuses(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    assert files.read_verified(tmp_path / "a", files.sha256_bytes(b"content")) == b"content"
    with pytest.raises(IntegrityError, match="was altered"):
        files.read_verified(tmp_path / "a", files.sha256_bytes(b"other"))


def test_canonical_json_of_equal_values_is_equal() -> None:
    assert files.canonical_json({"b": 1, "a": "ß"}) == files.canonical_json({"a": "ß", "b": 1})
    assert files.digest_json({"a": 1}) != files.digest_json({"a": 2})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_canonical_json_refuses_nan_and_infinities(value: float) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        files.canonical_json(value)


def test_write_text_replaces_the_file_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    files.write_text(tmp_path / "deep" / "a.txt", "one")
    files.write_text(tmp_path / "deep" / "a.txt", "two")
    assert [(path.name, path.read_text()) for path in (tmp_path / "deep").iterdir()] == [
        ("a.txt", "two")
    ]


@pytest.mark.parametrize("umask", [0o022, 0o000])
def test_private_file_is_never_readable_by_others_while_it_is_written(
    tmp_path: Path, umask: int
) -> None:
    path = tmp_path / "a"
    path.write_text("for all")
    path.chmod(0o644)
    before = os.umask(umask)
    try:
        with files.new_file(path, files.PRIVATE) as file:
            file.write(b"mine")
            (partial,) = tmp_path.glob("a.*.partial")
            assert stat.S_IMODE(partial.stat().st_mode) == 0o600
        files.write_text(tmp_path / "b", "mine", files.PRIVATE)
        files.write_text(tmp_path / "c", "for all")
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in "abc"] == [
        0o600,
        0o600,
        0o666 & ~umask,
    ]


def test_private_directory_is_created_private_and_an_existing_one_keeps_its_mode(
    tmp_path: Path,
) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old").chmod(0o755)
    for name in ("old", "deep/new"):
        files.make_private_directory(tmp_path / name)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("old", "deep/new")] == [
        0o755,
        0o700,
    ]


def test_failed_atomic_write_keeps_the_old_file(tmp_path: Path) -> None:
    files.write_json(tmp_path / "a.json", {"old": 1})
    with pytest.raises(ValueError, match="JSON compliant"):
        files.write_json(tmp_path / "a.json", {"new": float("nan")})
    assert (tmp_path / "a.json").read_text() == files.canonical_json({"old": 1})


def test_next_writer_removes_leftovers_of_a_killed_one(tmp_path: Path) -> None:
    (tmp_path / f"a.{DEAD}.partial").write_text("half")
    (tmp_path / f"folder.{DEAD}.partial").mkdir()
    (tmp_path / f"folder.{DEAD}.partial" / "half").touch()
    (tmp_path / f"folder.{DEAD}.replaced.partial").mkdir()
    files.write_text(tmp_path / "a", "whole")
    with files.new_directory(tmp_path / "folder"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "folder"]


def test_partial_files_of_living_processes_are_kept(tmp_path: Path) -> None:
    (tmp_path / f"a.{os.getppid()}.partial").write_text("being written")
    (tmp_path / f"ab.{DEAD}.partial").write_text("another file's")
    files.write_text(tmp_path / "a", "whole")
    assert len(list(tmp_path.glob("*.partial"))) == 2


def test_files_whose_names_share_a_prefix_can_be_written_at_once(tmp_path: Path) -> None:
    with files.new_directory(tmp_path / "a.b") as folder:
        files.write_text(tmp_path / "a", "whole")
        (folder / "new").touch()
    assert (tmp_path / "a.b" / "new").exists()


REPLACE = """
import os, shutil, sys
from pathlib import Path
from slipway.system import files
shutil.rmtree = lambda *_, **__: os.kill(os.getpid(), 9)
with files.new_directory(Path(sys.argv[1])) as folder:
    (folder / "new").touch()
"""


def test_kill_during_removal_leaves_no_half_directory(tmp_path: Path) -> None:
    with files.new_directory(tmp_path / "out") as folder:
        (folder / "old").touch()
    assert (
        subprocess.run(
            [sys.executable, "-c", REPLACE, str(tmp_path / "out")], check=False
        ).returncode
        == -9
    )
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["new"]
    with files.new_directory(tmp_path / "out"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_new_directory_replaces_the_old_one_as_a_whole(tmp_path: Path) -> None:
    for name in ("old", "new"):
        with files.new_directory(tmp_path / "out") as folder:
            (folder / name).touch()
            assert not (tmp_path / "out" / "new").exists()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["new"]


def _fill_and_stop(path: Path) -> None:
    with files.new_directory(path) as folder:
        (folder / "new").touch()
        raise KeyboardInterrupt


def test_new_directory_vanishes_after_an_error_and_the_old_one_stays(tmp_path: Path) -> None:
    with files.new_directory(tmp_path / "out") as folder:
        (folder / "old").touch()
    with pytest.raises(KeyboardInterrupt):
        _fill_and_stop(tmp_path / "out")
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "out",
        "out/old",
    ]


@pytest.mark.parametrize("is_other_file_system", [False, True])
def test_move_directory_replaces_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_other_file_system: bool
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()
    (tmp_path / "work" / "deep").mkdir(parents=True)
    (tmp_path / "work" / "deep" / "new").write_text("content")
    rename = Path.rename

    def refusing(source: Path, target: Path) -> Path:
        if is_other_file_system and source.name == "work":
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", refusing)
    files.move_directory(tmp_path / "work", tmp_path / "out")
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "out",
        "out/deep",
        "out/deep/new",
    ]
    assert (tmp_path / "out" / "deep" / "new").read_text() == "content"


def test_failed_move_of_a_directory_keeps_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("out", "work"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    rename = Path.rename

    def refusing(source: Path, target: Path) -> Path:
        if source.name == "work":
            raise PermissionError(errno.EACCES, "Permission denied")
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", refusing)
    with pytest.raises(PermissionError):
        files.move_directory(tmp_path / "work", tmp_path / "out")
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "out",
        "out/out",
        "work",
        "work/work",
    ]


HOLD = """
import sys
from pathlib import Path
from slipway.system import files
with files.lock(Path(sys.argv[1]), "training"):
    print("held", flush=True)
    sys.stdin.read()
"""


HOLD_WITH_FORK = HOLD.replace(
    'print("held', 'import os, time; os.fork() or (time.sleep(5), os._exit(0)); print("held'
)


def test_a_forked_child_of_a_killed_process_does_not_hold_its_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD_WITH_FORK, str(tmp_path / "lock")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        holder.kill()
        holder.wait()
        with files.lock(tmp_path / "lock", "training"):
            assert (tmp_path / "lock").exists()


def test_lock_excludes_a_second_process_until_the_first_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(
                LockedError, match=f"training is already running as process {holder.pid}"
            ),
            files.lock(path, "training"),
        ):
            pass
        holder.kill()
    with files.lock(path, "training"):
        assert path.read_text() == str(os.getpid())


def test_claim_space_allocates_all_disk_blocks_of_a_sparse_file(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(1 << 20)
    assert path.stat().st_blocks * 512 < 1 << 20
    files.claim_space(path)
    assert path.stat().st_size == 1 << 20 <= path.stat().st_blocks * 512


def test_error_of_a_failed_write_names_the_path(tmp_path: Path) -> None:
    code = (
        "import resource, sys; from pathlib import Path; from slipway.system import files\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try: files.write_bytes(Path(sys.argv[1]), bytes(2000))\n"
        "except OSError as error: print(error.errno, error.filename)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert said == f"{errno.EFBIG} {tmp_path / 'a'}\n"
    assert list(tmp_path.iterdir()) == []
