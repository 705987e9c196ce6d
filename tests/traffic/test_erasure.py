"""Erased requests are gone from logs and database, also while the service has them open."""

from dataclasses import replace
from pathlib import Path

from slipway.serving.monitoring.labels import FeedbackItem, Prediction
from slipway.serving.monitoring.settings import Limits
from slipway.serving.monitoring.store import Part, Store
from slipway.traffic.erasure import count_lines, count_records, erase_lines, erase_records
from slipway.traffic.request_log import (
    SegmentWriter,
    encode_line,
    read_requests,
    segments,
)
from tests.traffic.test_request_log import MIB, logged, requests_in, write

LIMITS = Limits(1000, 3600.0, 1000, 3600.0)
SIMILAR_IDS = ("a", "A", "aa", "a.", "a-1", "xa")


def write_ids(folder: Path, *ids: str) -> SegmentWriter:
    writer = SegmentWriter(folder, MIB, 1)
    for number, name in enumerate(ids):
        writer.append(encode_line(replace(logged(number), request_id=name)))
    return writer


def test_a_request_is_erased_from_an_open_segment_and_its_writer_can_continue(
    tmp_path: Path,
) -> None:
    writer = write_ids(tmp_path, *SIMILAR_IDS)
    assert count_lines(tmp_path, {"a", "b"}) == 1
    assert erase_lines(tmp_path, {"a", "b"}) == 1
    writer.append(encode_line(replace(logged(9), request_id="later")))
    writer.close()
    assert [one.request_id for one in requests_in(tmp_path)] == [*SIMILAR_IDS[1:], "later"]
    (segment,) = segments(tmp_path)
    assert segment.read_bytes().split(b"\n")[0].isspace()
    assert erase_lines(tmp_path, {"a"}) == 0


def test_a_line_that_a_killed_process_erased_by_half_is_found_again(tmp_path: Path) -> None:
    write(tmp_path, range(3))
    (segment,) = segments(tmp_path)
    lines = segment.read_bytes().splitlines(keepends=True)
    half = lines[1][:40] + b" " * (len(lines[1]) - 41) + b"\n"  # killed between payload and id
    segment.write_bytes(lines[0] + half + lines[2])
    assert erase_lines(tmp_path, {"request-1"}) == 1
    assert [one.request_id for one in requests_in(tmp_path)] == ["request-0", "request-2"]


def test_an_incomplete_last_line_is_erased_once_its_writer_is_gone(tmp_path: Path) -> None:
    writer = write_ids(tmp_path, "a", "b")
    (segment,) = segments(tmp_path)
    segment.write_bytes(segment.read_bytes()[:-30])
    assert count_lines(tmp_path, {"b"}) == 0  # it may be in the middle of a write
    writer.close()
    assert erase_lines(tmp_path, {"b"}) == 1
    assert b'"b"' not in segment.read_bytes()
    assert [one.request_id for one in requests_in(tmp_path)] == ["a"]


def test_lines_of_the_access_log_are_erased_too(tmp_path: Path) -> None:
    write(tmp_path, range(1))
    (segment,) = segments(tmp_path)
    lines = [f'{{"time":"2026-11-26T21:00:00","request_id":"{name}","rows":1}}' for name in "ab"]
    segment.write_text("\n".join(lines) + "\n")
    assert erase_lines(tmp_path, {"a"}) == 1
    assert segment.read_text() == " " * len(lines[0]) + f"\n{lines[1]}\n"


def test_records_are_erased_while_the_service_has_its_database_open(tmp_path: Path) -> None:
    store = Store(tmp_path, LIMITS)
    predictions = [
        Prediction(name, item, 2, 1.8e9, "v", "secret-label", None)
        for name in SIMILAR_IDS
        for item in range(2)
    ]
    store.merge(Part(1, {}, predictions), {})
    store.add_feedback([FeedbackItem(name, 1, "dark", None, "key") for name in SIMILAR_IDS])
    assert count_records(tmp_path, {"a", "b"}) == {"predictions": 2, "labels": 1}
    many = {"a", *(f"b{number}" for number in range(1200))}
    assert erase_records(tmp_path, many) == {"predictions": 2, "labels": 1}
    assert erase_records(tmp_path, {"a"}) == {"predictions": 0, "labels": 0}
    store.add_feedback([FeedbackItem("later", 0, "dark", None)])
    assert count_records(tmp_path, set(SIMILAR_IDS)) == {"predictions": 10, "labels": 5}
    store.close()


def test_erased_text_no_longer_occurs_in_the_database_files(tmp_path: Path) -> None:
    store = Store(tmp_path, LIMITS)
    store.add_feedback([FeedbackItem("the-person", 0, "dark", None)])
    store.close()
    erase_records(tmp_path, {"the-person"})
    assert not any(b"the-person" in path.read_bytes() for path in tmp_path.iterdir())


def test_without_a_database_or_a_log_there_is_nothing_to_erase(tmp_path: Path) -> None:
    assert count_records(tmp_path, {"a"}) == erase_records(tmp_path, {"a"}) == {}
    assert erase_lines(tmp_path / "none", {"a"}) == 0
    assert not list(read_requests(tmp_path / "none"))
