"""Texts of logged requests are collected as rows, and replayed as network inputs."""

import json
from datetime import UTC, datetime

import numpy as np
import pytest

from slipway.artifacts.certificate import Execution
from slipway.inputs.texts import TextContract, decode_row
from slipway.replay.backends import decode_payload
from slipway.system.errors import DataError
from slipway.traffic.request_log import LoggedRequest
from slipway.traffic.selection import request_contents

pytestmark = pytest.mark.unit
CONTRACT = TextContract(
    kind="texts", columns=["title", "text"], max_bytes=32, max_characters=None, ignored=["id"]
)
JSON = "application/json"


def logged(body: object, content_type: str = JSON) -> LoggedRequest:
    return LoggedRequest(
        request_id="a",
        time=datetime.fromtimestamp(1.7e9, UTC),
        bundle_digest="ab" * 32,
        execution=Execution(
            backend="onnxruntime", provider="cpu", precision="fp32", variant="fp32"
        ),
        content_type=content_type,
        payload=json.dumps(body).encode(),
        is_list=False,
        inputs_sha256="",
        outputs={"probabilities": np.zeros((1, 2), np.float32)},
        answers=[],
    )


def test_the_texts_of_a_request_are_collected_without_ignored_columns() -> None:
    single = request_contents(logged({"text": "a", "id": 3}), CONTRACT)
    assert single == {0: {"title": None, "text": "a"}}
    several = request_contents(logged({"rows": [{"title": "t"}, {"text": "b"}]}), CONTRACT)
    assert several == {0: {"title": "t", "text": None}, 1: {"title": None, "text": "b"}}


def test_an_image_request_is_not_collected_for_a_model_of_texts() -> None:
    with pytest.raises(ValueError, match="like the model's"):
        request_contents(logged({}, "image/png"), CONTRACT)


def test_replay_decodes_a_text_request_into_the_same_rows_as_the_service() -> None:
    body = json.dumps({"rows": [{"title": "t", "text": "a  b"}, {"text": "c"}]}).encode()
    rows = decode_payload(JSON, body, CONTRACT)
    assert [decode_row(row, CONTRACT) for row in rows] == ["t\na b", "\nc"]
    with pytest.raises(DataError, match="the text is missing"):
        decode_payload(JSON, b'{"text": ""}', CONTRACT)
