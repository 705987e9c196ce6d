"""API keys: the file, the command that makes a key, reloading, and rates."""

import asyncio
import logging
import os
import stat
from pathlib import Path

import httpx
import pytest

from slipway.serving.auth.keys import (
    LOOK_EVERY_S,
    MARK,
    Bucket,
    Key,
    KeyFile,
    KeyRing,
    KeysError,
    add_key,
    digest_of,
    format_line,
    main,
    make_key,
    read_keys,
)
from slipway.serving.metrics.gauges import Sampler
from slipway.serving.worker import ModelWorker
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import metric, run

DIGEST = digest_of(b"a key").hex()


class Clock:
    """A clock whose time a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Ring:
    """A key ring on a file, with its clock and a list of reported faults."""

    def __init__(self, path: Path, num_workers: int = 1) -> None:
        self.clock = Clock()
        self.num_faults = 0
        self.ring = KeyRing(path, num_workers, self._count, self.clock)

    def _count(self) -> None:
        self.num_faults += 1

    def name_of(self, key: str) -> str | None:
        found = self.ring.find(key.encode())
        return found.name if found else None

    def look_again(self) -> None:
        self.clock.now += LOOK_EVERY_S


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def test_a_key_file_has_names_roles_rates_and_comments(path: Path) -> None:
    path.write_text(
        f"# ours\n\nalice:caller:{DIGEST}\n"
        f"ops:operator:{digest_of(b'other').hex()}:0.5 # until May\n"
    )
    assert read_keys(path) == (
        Key("alice", "caller", digest_of(b"a key"), None),
        Key("ops", "operator", digest_of(b"other"), 0.5),
    )


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("alice", "expected name:role"),
        (f"alice:caller:{DIGEST}:1:2", "expected name:role"),
        (f"al ice:caller:{DIGEST}", "a name has"),
        (f":caller:{DIGEST}", "a name has"),
        (f"alice:admin:{DIGEST}", "the role is one of caller, operator"),
        ("alice:caller:a-key-in-the-clear", "expected the SHA-256"),
        (f"alice:caller:{DIGEST.upper()}", "expected the SHA-256"),
        (f"alice:caller:{DIGEST}:", "the rate is"),
        (f"alice:caller:{DIGEST}:0", "the rate is"),
        (f"alice:caller:{DIGEST}:-1", "the rate is"),
        (f"alice:caller:{DIGEST}:nan", "the rate is"),
        (f"alice:caller:{DIGEST}:inf", "the rate is"),
        (f"alice:caller:{DIGEST}\nbob:caller:{DIGEST}", "line 2: the same key"),
    ],
)
def test_an_invalid_line_is_reported_by_number_and_never_quoted(
    path: Path, line: str, reason: str
) -> None:
    path.write_text(line + "\n")
    with pytest.raises(KeysError, match=reason) as error:
        read_keys(path)
    assert "in-the-clear" not in str(error.value)
    assert DIGEST not in str(error.value)


def test_all_invalid_lines_are_reported_at_once(path: Path) -> None:
    path.write_text(f"one\nalice:caller:{DIGEST}\nthree\n")
    with pytest.raises(KeysError, match=r"line 1: .*; line 3: "):
        read_keys(path)


@pytest.mark.parametrize("content", [b"\xff\xfe" * 10, b"#" * (1 << 20) + b"#", b"x\n" * 2000])
def test_file_that_is_not_a_key_file_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(KeysError):
        read_keys(path)


def test_a_key_file_with_too_many_keys_is_refused(path: Path) -> None:
    lines = [
        format_line(Key("n", "caller", digest_of(str(number).encode()), None))
        for number in range(1001)
    ]
    path.write_text("".join(lines[:1000]))
    assert len(read_keys(path)) == 1000
    path.write_text("".join(lines))
    with pytest.raises(KeysError, match="1001 keys, the limit is 1000"):
        read_keys(path)


def test_key_ring_finds_only_the_key_that_was_made(path: Path) -> None:
    first, second = add_key(path, "alice", "caller", None), add_key(path, "bob", "operator", 2.0)
    ring = Ring(path)
    assert (ring.name_of(first), ring.name_of(second)) == ("alice", "bob")
    for wrong in (
        "",
        first[:-1],
        first + "x",
        first.upper(),
        digest_of(first.encode()).hex(),
        make_key(),
    ):
        assert ring.name_of(wrong) is None


def test_a_key_file_is_private_and_holds_only_digests(path: Path) -> None:
    key = add_key(path, "alice", "caller", 50)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert key not in path.read_text()
    assert key.startswith(MARK)
    assert len(key) >= len(MARK) + 43  # 256 bits
    assert path.read_text() == f"alice:caller:{digest_of(key.encode()).hex()}:50\n"


def test_a_key_is_added_on_its_own_line(path: Path) -> None:
    path.write_text(f"alice:caller:{DIGEST}")  # as an editor may leave it
    add_key(path, "bob", "caller", None)
    assert [key.name for key in read_keys(path)] == ["alice", "bob"]


def test_no_key_is_added_to_an_invalid_file_or_by_an_invalid_line(
    path: Path,
) -> None:
    with pytest.raises(KeysError, match="a name has"):
        add_key(path, "al ice", "caller", None)
    with pytest.raises(KeysError, match="the rate is"):
        add_key(path, "alice", "caller", 0)
    assert not path.exists()
    path.write_text("something else\n")
    with pytest.raises(KeysError, match="line 1"):
        add_key(path, "alice", "caller", None)
    assert path.read_text() == "something else\n"


def test_keys_command_prints_only_the_key_on_stdout(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ops", "--role", "operator", "--rate", "5", "--file", str(path)]) == 0
    output, remarks = capsys.readouterr()
    assert Ring(path).name_of(output.strip()) == "ops"
    assert output.strip() not in remarks
    assert read_keys(path)[0].rate == 5


def test_keys_command_uses_the_services_key_file_and_reports_errors(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLIPWAY_KEYS", raising=False)
    assert main(["alice"]) == 1
    assert "--file" in capsys.readouterr().err
    monkeypatch.setenv("SLIPWAY_KEYS", str(path))
    assert main(["alice"]) == 0
    path.write_text("x\n")
    capsys.readouterr()
    assert main(["alice"]) == 1
    assert "line 1" in capsys.readouterr().err


def test_changed_key_file_is_reloaded_within_a_second_and_drops_removed_keys(
    path: Path,
) -> None:
    old = add_key(path, "alice", "caller", None)
    ring = Ring(path)
    new = add_key(path, "alice", "caller", None)
    assert ring.name_of(new) is None  # the twin: it does not look at each request
    ring.look_again()
    assert (ring.name_of(old), ring.name_of(new)) == ("alice", "alice")
    path.write_text(path.read_text().splitlines(keepends=True)[1])
    ring.look_again()
    assert (ring.name_of(old), ring.name_of(new)) == (None, "alice")


def test_a_replaced_key_file_is_reloaded_even_with_the_same_time_and_size(
    path: Path, tmp_path: Path
) -> None:
    old = add_key(path, "alice", "caller", None)
    ring = Ring(path)
    new = add_key(tmp_path / "new", "alice", "caller", None)
    times = path.stat()
    os.utime(tmp_path / "new", ns=(times.st_atime_ns, times.st_mtime_ns))
    (tmp_path / "new").rename(path)
    ring.look_again()
    assert (ring.name_of(old), ring.name_of(new)) == (None, "alice")


@pytest.mark.parametrize("spoil", ["gone", "wrong line", "a folder"])
def test_invalid_key_file_leaves_the_loaded_keys_and_is_reported_once(
    path: Path, spoil: str, caplog: pytest.LogCaptureFixture
) -> None:
    key = add_key(path, "alice", "caller", None)
    ring = Ring(path)
    good = path.read_text()
    path.unlink()
    if spoil == "wrong line":
        path.write_text(good + "x\n")
    elif spoil == "a folder":
        path.mkdir()
    with caplog.at_level(logging.ERROR, "bentoml.slipway"):
        for _ in range(5):
            ring.look_again()
            assert ring.name_of(key) == "alice"
    assert ring.num_faults == 1
    assert len(caplog.records) == 1
    if spoil == "a folder":
        path.rmdir()
    path.write_text(format_line(Key("bob", "caller", digest_of(b"bob's"), None)))
    ring.look_again()
    assert (ring.name_of(key), ring.name_of("bob's")) == (None, "bob")


@pytest.mark.parametrize("spoil", ["gone", "wrong line", "a folder"])
def test_key_file_gauge_is_1_while_the_key_file_is_invalid(path: Path, spoil: str) -> None:
    add_key(path, "alice", "caller", None)
    good, shown = path.read_text(), list[bool]()
    file = KeyFile(path, shown.append)
    file.sample()
    path.unlink()
    if spoil == "wrong line":
        path.write_text(good + "x\n")
    elif spoil == "a folder":
        path.mkdir()
    for _ in range(3):
        file.sample()
    if spoil == "a folder":
        path.rmdir()
    path.write_text(good)
    file.sample()
    assert shown == [False, True, True, True, False]


def test_metrics_show_an_invalid_key_file_without_any_request(
    path: Path, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sampler.__init__, "__defaults__", (0.02,))
    add_key(path, "alice", "caller", None)

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        async def shown(value: float) -> None:
            async with asyncio.timeout(10):
                while metric(worker, "slipway_key_file_invalid") != value:
                    await asyncio.sleep(0.02)

        await shown(0)
        good = path.read_text()
        path.write_text("x\n")
        await shown(1)
        await asyncio.sleep(0.2)
        assert metric(worker, "slipway_key_file_invalid") == 1
        path.write_text(good)
        await shown(0)

    run(make_settings(keys=path), work)


def test_a_worker_without_its_key_file_admits_nobody_until_it_exists(
    path: Path, tmp_path: Path
) -> None:
    ring = Ring(path)
    key = add_key(tmp_path / "later", "alice", "caller", None)
    assert (ring.name_of(key), ring.num_faults) == (None, 1)
    (tmp_path / "later").rename(path)
    ring.look_again()
    assert ring.name_of(key) == "alice"


def test_token_bucket_admits_its_rate_and_returns_the_seconds_to_wait() -> None:
    bucket = Bucket(rate=4.0, now=0.0)
    assert [bucket.take(0.0) for _ in range(4)] == [0.0] * 4
    assert bucket.take(0.0) == pytest.approx(0.25)
    assert bucket.take(0.2) == pytest.approx(0.05)
    assert bucket.take(0.25) == 0.0
    taken = sum(
        bucket.take(1 + step / 100) == 0.0 for step in range(1000)
    )  # ten seconds of a hundred a second
    assert taken == pytest.approx(40, abs=4)


def test_a_bucket_with_a_rate_below_one_admits_one_request_at_once() -> None:
    bucket = Bucket(rate=0.1, now=0.0)
    assert bucket.take(0.0) == 0.0
    assert bucket.take(1.0) == pytest.approx(9.0)
    assert bucket.take(10.0) == 0.0


def taken_at_once(ring: Ring, key: str) -> int:
    found = ring.ring.find(key.encode())
    assert found
    return sum(ring.ring.take(found) == 0.0 for _ in range(100))


def test_each_key_has_its_own_rate_divided_among_the_workers(path: Path) -> None:
    slow, fast, free = (
        add_key(path, name, "caller", rate)
        for name, rate in (("slow", 4), ("fast", 20), ("free", None))
    )
    assert [taken_at_once(Ring(path, num_workers=2), key) for key in (slow, fast, free)] == [
        2,
        10,
        100,
    ]


def test_reloading_the_key_file_keeps_the_used_tokens_of_a_key(path: Path) -> None:
    key = add_key(path, "alice", "caller", 0.001)
    ring = Ring(path)
    assert taken_at_once(ring, key) == 1
    add_key(path, "bob", "caller", None)
    ring.look_again()
    assert taken_at_once(ring, key) == 0
