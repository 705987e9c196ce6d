"""The load test sends the golden rows, or the example row of a table."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from slipway.inputs.png import decode_plain_png
from slipway.serving.load_test.samples import samples_of
from slipway.system.errors import DataError
from tests.serving.bundles import (
    CONTRACT,
    row_classifier,
    with_golden_rows,
    write_bundle,
)


def bodies(requests: Sequence[bytes]) -> list[bytes]:
    return [request.partition(b"\r\n\r\n")[2] for request in requests]


def test_samples_are_the_golden_rows_or_the_example_row_of_a_table(tmp_path: Path) -> None:
    bundle = with_golden_rows(write_bundle(tmp_path / "images"))
    rows, sent = bundle.golden_rows(), samples_of(bundle)
    assert rows is not None
    for body, pixels in zip(bodies(sent.requests), rows.inputs, strict=True):
        decoded = decode_plain_png(body, CONTRACT.max_pixels)
        assert decoded is not None
        assert decoded.tobytes() == pixels.tobytes()
    table = samples_of(write_bundle(tmp_path / "table", row_classifier()))
    assert set(json.loads(bodies(table.requests)[0])) == {
        "age",
        "income",
        "colour",
        "city",
        "member",
        "since",
    }
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "a.jpg").write_bytes(b"body")
    assert bodies(samples_of(bundle, tmp_path / "own").requests) == [b"body"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="0 bytes"):
        samples_of(bundle, tmp_path / "empty")
    with pytest.raises(DataError, match="cannot be read"):
        samples_of(bundle, tmp_path / "gone")
