"""Erased requests disappear from logs and database, even while the service has them open."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slipway.inputs.images import ImageContract
from slipway.inputs.multipart import encode_images
from slipway.inputs.texts import TextContract
from slipway.serving.monitoring.labels import FeedbackItem, Prediction
from slipway.serving.monitoring.settings import Limits
from slipway.serving.monitoring.store import Part, Store
from slipway.system.errors import DataError
from slipway.traffic import erasure
from slipway.traffic.erasure import count_lines, count_records, erase_lines, erase_records
from slipway.traffic.request_log import (
    LoggedRequest,
    SegmentWriter,
    encode_line,
    read_requests,
    segments,
)
from slipway.traffic.selection import request_contents
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
    assert count_lines(tmp_path, dict.fromkeys("ab")) == 1
    assert erase_lines(tmp_path, dict.fromkeys("ab")) == 1
    writer.append(encode_line(replace(logged(9), request_id="later")))
    writer.close()
    assert [one.request_id for one in requests_in(tmp_path)] == [*SIMILAR_IDS[1:], "later"]
    (segment,) = segments(tmp_path)
    assert segment.read_bytes().split(b"\n")[0].isspace()
    assert erase_lines(tmp_path, {"a": None}) == 0


def test_line_half_erased_by_a_killed_process_is_found_again(tmp_path: Path) -> None:
    write(tmp_path, range(3))
    (segment,) = segments(tmp_path)
    lines = segment.read_bytes().splitlines(keepends=True)
    half = lines[1][:40] + b" " * (len(lines[1]) - 41) + b"\n"  # killed between payload and id
    segment.write_bytes(lines[0] + half + lines[2])
    assert erase_lines(tmp_path, {"request-1": None}) == 1
    assert [one.request_id for one in requests_in(tmp_path)] == ["request-0", "request-2"]


def test_an_incomplete_last_line_is_erased_once_its_writer_is_gone(tmp_path: Path) -> None:
    writer = write_ids(tmp_path, "a", "b")
    (segment,) = segments(tmp_path)
    segment.write_bytes(segment.read_bytes()[:-30])
    assert count_lines(tmp_path, {"b": None}) == 0  # it may be in the middle of a write
    writer.close()
    assert erase_lines(tmp_path, {"b": None}) == 1
    assert b'"b"' not in segment.read_bytes()
    assert [one.request_id for one in requests_in(tmp_path)] == ["a"]


def rows_request(number: int, name: str, *texts: str) -> LoggedRequest:
    """Return a request of several text rows."""
    payload = json.dumps({"rows": [{"text": text} for text in texts]}, ensure_ascii=False)
    return replace(
        logged(number),
        request_id=name,
        content_type="application/json",
        payload=payload.encode(),
        answers=[{"label": "a"}] * len(texts),
        outputs={"logits": np.ones((len(texts), 2), np.float32)},
        is_list=True,
    )


IMAGES = ImageContract(
    kind="images", size_px=1, channels=3, resize_mode="stretch", interpolation="nearest",
    max_pixels=1, transform=None,
)  # fmt: skip
TEXTS = TextContract(kind="texts", columns=["text"], max_bytes=100, max_characters=None)


def test_erasing_one_row_of_a_request_keeps_the_numbers_of_the_others(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, MIB, 1)
    for number, name in enumerate(("a", "b")):
        writer.append(encode_line(rows_request(number, name, "one", "secret é", "three")))
    rows = {"a": frozenset({1, 7})}
    assert count_lines(tmp_path, rows) == erase_lines(tmp_path, rows) == 1
    writer.append(encode_line(rows_request(3, "later", "four")))
    writer.close()
    first, second, later = requests_in(tmp_path)
    assert request_contents(first, TEXTS) == {0: {"text": "one"}, 2: {"text": "three"}}
    assert (first.erased, first.inputs_sha256) == ((1,), "")
    assert first.outputs["logits"].tolist() == [[1, 1], [0, 0], [1, 1]]
    assert first.answers == [{"label": "a"}, {}, {"label": "a"}]
    assert len(request_contents(second, TEXTS)) == 3
    assert later.request_id == "later"
    assert count_lines(tmp_path, rows) == 0
    assert erase_lines(tmp_path, {"a": frozenset({0, 2})}) == 1  # the last ones: the line goes
    assert [one.request_id for one in requests_in(tmp_path)] == ["b", "later"]


def test_erasing_one_image_of_a_request_keeps_the_other_images(tmp_path: Path) -> None:
    images = [b"first image", b"the person", b"third image"]
    kind, payload = encode_images(images)
    request = replace(
        rows_request(0, "a", *"abc"), content_type=kind, payload=payload, is_list=True
    )
    writer = SegmentWriter(tmp_path, MIB, 1)
    writer.append(encode_line(request))
    writer.close()
    assert erase_lines(tmp_path, {"a": frozenset({1})}) == 1
    (left,) = requests_in(tmp_path)
    assert request_contents(left, IMAGES) == {0: images[0], 2: images[2]}


def test_next_erasure_completes_a_half_erased_row(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, MIB, 1)
    writer.append(encode_line(rows_request(0, "a", "one", "two")))
    writer.close()
    (segment,) = segments(tmp_path)
    before, rows = segment.read_bytes(), {"a": frozenset({0})}
    written: list[bytes] = []

    def die(_: int, __: int, content: bytes) -> None:
        written.append(content)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(erasure, "_write", die)
        with pytest.raises(KeyboardInterrupt):
            erase_lines(tmp_path, rows)
    half = len(written[0]) // 2
    segment.write_bytes(written[0][:half] + before[half:])
    erase_lines(tmp_path, rows)
    (left,) = requests_in(tmp_path)
    assert request_contents(left, TEXTS) == {1: {"text": "two"}}
    assert [path.name for path in tmp_path.iterdir()] == [segment.name]


def test_erasure_refuses_a_row_whose_shortened_line_would_not_fit(tmp_path: Path) -> None:
    request = rows_request(0, "a", "one", "two")
    payload = b'{"rows":[1,' + b"1e16," * 90 + b"2]}"
    writer = SegmentWriter(tmp_path, MIB, 1)
    writer.append(encode_line(replace(request, payload=payload, answers=[{}] * 92, outputs={})))
    writer.close()
    before = [path.read_bytes() for path in segments(tmp_path)]
    with pytest.raises(DataError, match="--request-id a --whole-requests"):
        erase_lines(tmp_path, {"a": frozenset({0})})
    assert [path.read_bytes() for path in segments(tmp_path)] == before


def test_erasing_one_row_deletes_only_its_predictions_and_labels(tmp_path: Path) -> None:
    store = Store(tmp_path, LIMITS)
    predictions = [Prediction("a", item, 3, 1.8e9, "v", "dark", None) for item in range(3)]
    store.merge(Part(1, {}, predictions), {})
    store.add_feedback([FeedbackItem("a", item, "dark", None) for item in (1, 2)])
    rows = {"a": frozenset({1}), "b": None}
    assert count_records(tmp_path, rows) == {"predictions": 1, "labels": 1}
    assert erase_records(tmp_path, rows) == {"predictions": 1, "labels": 1}
    assert count_records(tmp_path, {"a": None}) == {"predictions": 2, "labels": 1}
    store.close()


def test_lines_of_the_access_log_are_erased_too(tmp_path: Path) -> None:
    write(tmp_path, range(1))
    (segment,) = segments(tmp_path)
    lines = [f'{{"time":"2026-11-26T21:00:00","request_id":"{name}","rows":1}}' for name in "ab"]
    segment.write_text("\n".join(lines) + "\n")
    assert erase_lines(tmp_path, {"a": None}) == 1
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
    assert count_records(tmp_path, dict.fromkeys("ab")) == {"predictions": 2, "labels": 1}
    many = dict.fromkeys(["a", *(f"b{number}" for number in range(1200))])
    assert erase_records(tmp_path, many) == {"predictions": 2, "labels": 1}
    assert erase_records(tmp_path, {"a": None}) == {"predictions": 0, "labels": 0}
    store.add_feedback([FeedbackItem("later", 0, "dark", None)])
    assert count_records(tmp_path, dict.fromkeys(SIMILAR_IDS)) == {"predictions": 10, "labels": 5}
    store.close()


def test_erased_text_no_longer_occurs_in_the_database_files(tmp_path: Path) -> None:
    store = Store(tmp_path, LIMITS)
    store.add_feedback([FeedbackItem("the-person", 0, "dark", None)])
    store.close()
    erase_records(tmp_path, {"the-person": None})
    assert not any(b"the-person" in path.read_bytes() for path in tmp_path.iterdir())


def test_without_a_database_or_a_log_there_is_nothing_to_erase(tmp_path: Path) -> None:
    assert count_records(tmp_path, {"a": None}) == erase_records(tmp_path, {"a": None}) == {}
    assert erase_lines(tmp_path / "none", {"a": None}) == 0
    assert not list(read_requests(tmp_path / "none"))
