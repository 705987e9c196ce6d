"""The request log on disk: round trips, killed writers, and limits of size and age."""

import json
import os
import stat
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow.dataset
import pytest

from slipway.artifacts.certificate import Execution
from slipway.system.errors import IntegrityError
from slipway.traffic.request_log import (
    DamagedLine,
    LoggedRequest,
    SegmentWriter,
    decode_line,
    digest_inputs,
    encode_line,
    find_requests,
    read_requests,
    segments,
)

MIB = 1 << 20
EXECUTION = Execution(backend="onnxruntime", provider="cpu", precision="fp32", variant="fp32")
OUTPUTS = np.array([[0.1, -0.0, 1e-42], [np.float32(1) / 3, 3.4e38, 0.7]], np.float32)


def logged(number: int = 0, num_bytes: int = 100) -> LoggedRequest:
    return LoggedRequest(
        request_id=f"request-{number}",
        time=datetime.fromtimestamp(1.7e9 + number + 0.123456, UTC),
        bundle_digest="ab" * 32,
        execution=EXECUTION,
        content_type="application/octet-stream",
        payload=np.random.default_rng(number).bytes(num_bytes),
        is_list=False,
        inputs_sha256=digest_inputs(np.zeros((2, 3))),
        outputs={"probabilities": OUTPUTS},
        answers=[{"label": "ä", "probabilities": {"ä": 0.5}}] * 2,
    )


def requests_in(folder: Path) -> list[LoggedRequest]:
    found = list(read_requests(folder))
    assert not [one for one in found if isinstance(one, DamagedLine)]
    return [one for one in found if isinstance(one, LoggedRequest)]


def write(folder: Path, numbers: range, num_bytes: int = 100) -> None:
    writer = SegmentWriter(folder, MIB, 1)
    for number in numbers:
        writer.append(encode_line(logged(number, num_bytes)))
    writer.close()


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_logged_request_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    write(tmp_path / "log", range(3))
    for number, found in enumerate(requests_in(tmp_path / "log")):
        expected = logged(number)
        assert found.outputs["probabilities"].tobytes() == OUTPUTS.tobytes()
        assert found.outputs["probabilities"].shape == OUTPUTS.shape
        assert replace(found, outputs={}) == replace(expected, outputs={})


def test_log_files_are_readable_by_the_owner_only(tmp_path: Path) -> None:
    write(tmp_path / "parent/log", range(1))
    assert stat.S_IMODE((tmp_path / "parent/log").stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "parent/log").iterdir()] == [
        0o600
    ]


def test_log_line_of_format_1_is_read_with_the_present_field_names() -> None:
    content = json.loads(encode_line(logged())) | {"format_version": 1}
    content["answers"] = [{"label": "a", "outlier_score": 0.5, "is_outlier": False}] * 2
    content["outputs"]["outlier_score"] = content["outputs"].pop("probabilities")
    found = decode_line(json.dumps(content).encode())
    assert found.answers == [{"label": "a", "ood_score": 0.5, "is_ood": False}] * 2
    assert list(found.outputs) == ["ood_score"]


def test_incomplete_last_line_is_skipped_and_the_next_writer_continues(tmp_path: Path) -> None:
    write(tmp_path, range(3))
    path = segments(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:-40])
    write(tmp_path, range(3, 5))
    assert [request.request_id for request in requests_in(tmp_path)] == [
        "request-0",
        "request-1",
        "request-3",
        "request-4",
    ]


@pytest.mark.parametrize(
    "damage", [b'"payload":"A', b'"sha256":"0', b'"shape":[9,', b'"backend":"zz']
)
def test_altered_line_is_reported_and_the_others_are_read(tmp_path: Path, damage: bytes) -> None:
    write(tmp_path, range(3))
    path = segments(tmp_path)[0]
    lines = path.read_bytes().splitlines(keepends=True)
    place = lines[1].index(damage[: damage.rindex(b":") + 2])
    lines[1] = lines[1][:place] + damage + lines[1][place + len(damage) :]
    path.write_bytes(b"".join(lines))
    found = list(read_requests(tmp_path))
    assert [isinstance(one, DamagedLine) for one in found] == [False, True, False]
    assert str(found[1]).startswith(f"line 2 of {path} was altered: ")
    assert len(find_requests(tmp_path, "request-2")) == 1
    with pytest.raises(IntegrityError, match=r"line 2 of .* was altered"):
        find_requests(tmp_path, "request-1")


def test_find_requests_returns_all_requests_with_exactly_this_id(tmp_path: Path) -> None:
    write(tmp_path / "log", range(12))
    write(tmp_path / "log", range(1, 2))
    assert [request.request_id for request in find_requests(tmp_path / "log", "request-1")] == [
        "request-1"
    ] * 2
    assert find_requests(tmp_path / "log", "request-") == []
    assert find_requests(tmp_path / "log", '../log/"') == []
    assert find_requests(tmp_path / "gone", "request-1") == []


def test_the_log_folder_stays_within_its_limit_by_removing_the_oldest_segments(
    tmp_path: Path,
) -> None:
    writers = [SegmentWriter(tmp_path, MIB, 3) for _ in range(3)]
    for number in range(600):
        writers[number % 3].append(encode_line(logged(number, 4000)))
        assert number % 50 or size(tmp_path) <= MIB
    assert size(tmp_path) <= MIB
    found = sorted(int(request.request_id.rpartition("-")[2]) for request in requests_in(tmp_path))
    assert found[-1] == 599
    assert len(found) > 600 * 0.15  # most of a bound that holds about 180
    assert set(range(599 - len(found) // 2, 600)) <= set(found)


def test_requests_of_the_limit_test_would_exceed_the_limit_without_removal(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, 100 * MIB, 1)
    for number in range(600):
        writer.append(encode_line(logged(number, 4000)))
    assert size(tmp_path) > 3 * MIB


def test_open_segment_of_a_live_writer_is_not_removed(tmp_path: Path) -> None:
    first, second = SegmentWriter(tmp_path, MIB, 2), SegmentWriter(tmp_path, MIB, 2)
    first.append(encode_line(logged(1)))
    path = segments(tmp_path)[0]
    for number in range(400):
        second.append(encode_line(logged(number, 4000)))
    assert path.exists()
    first.close()
    for number in range(400):
        second.append(encode_line(logged(number, 4000)))
    assert not path.exists()


def test_request_log_removes_no_other_files_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "notes.jsonl").write_text("x" * 2 * MIB)
    write(tmp_path, range(400), 4000)
    assert (tmp_path / "notes.jsonl").exists()


def test_tidy_removes_requests_older_than_the_age_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1.7e9
    monkeypatch.setattr("slipway.traffic.request_log.time.time", lambda: now)

    class Clock(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return datetime.fromtimestamp(now, UTC)

    monkeypatch.setattr("slipway.traffic.request_log.datetime", Clock)
    writer = SegmentWriter(tmp_path, MIB, 1, max_age_s=2400)
    writer.append(encode_line(logged(1)))
    now += 90
    writer.append(encode_line(logged(2)))
    now += 20
    writer.append(encode_line(logged(3)))
    assert len(segments(tmp_path)) == 2  # the first took requests for 100 s
    now += 2200
    writer.tidy()
    assert [request.request_id for request in requests_in(tmp_path)] == ["request-3"]
    now += 105
    writer.tidy()
    assert segments(tmp_path) == []


def test_failed_write_leaves_no_part_of_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, writer = os.write, SegmentWriter(tmp_path, MIB, 1)
    writer.append(encode_line(logged(1)))

    def refuse(descriptor: int, content: memoryview) -> int:
        if len(content) < 60:
            raise OSError(28, "No space left on device")
        return real(descriptor, content[:50])

    with monkeypatch.context() as patched:
        patched.setattr("slipway.traffic.request_log.os.write", refuse)
        for _ in range(3):
            with pytest.raises(OSError, match="No space"):
                writer.append(encode_line(logged(2)))
    assert [path.stat().st_size > 0 for path in segments(tmp_path)] == [
        True
    ]  # and no empty segments
    writer.append(encode_line(logged(3)))
    assert [request.request_id for request in requests_in(tmp_path)] == ["request-1", "request-3"]


def test_pyarrow_reads_a_segment(tmp_path: Path) -> None:
    write(tmp_path, range(50))
    table = pyarrow.dataset.dataset(tmp_path, format="json").to_table(
        columns=["request_id", "time", "payload", "answers"]
    )
    assert table.num_rows == 50
    assert (
        json.loads(segments(tmp_path)[0].read_text().splitlines()[0])["answers"][0]["label"] == "ä"
    )


def test_encode_line_refuses_predictions_that_json_cannot_hold() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode_line(replace(logged(), answers=[{"value": float("nan")}]))
    assert decode_line(encode_line(logged())).num_rows == 2
