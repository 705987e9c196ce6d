"""A text is encoded equally in training, by both protocols of the service and by `predict`."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from slipway.inference.texts import TextReader
from slipway.inputs.texts import TextContract, encode_texts, text_of
from slipway.serving.open_inference.conversion import read_texts
from slipway.serving.open_inference.tensors import BYTES, Tensor
from slipway.serving.requests.rows import TextDecoder
from tests import plain_http
from tests.sentences import HALF, hostile_texts
from tests.serving.bundles import text_classifier
from tests.serving.ready_service import ready_service
from tests.tokens import token_contract

pytestmark = pytest.mark.unit
CONTRACT = TextContract(kind="texts", columns=["text"], max_bytes=64, max_characters=2_000_000)
NUM_TEXTS = 10_000


def decoded(body: bytes, num_rows: int, contract: TextContract = CONTRACT) -> NDArray[Any]:
    decoder = TextDecoder(contract, num_rows)
    try:
        inputs: NDArray[Any] = asyncio.run(decoder.decode(body)).inputs
        return inputs
    finally:
        decoder.close()


@pytest.mark.parametrize("kind", ["bytes", pytest.param("tokens", marks=pytest.mark.process)])
def test_ten_thousand_hostile_texts_are_encoded_equally_in_training_and_serving(kind: str) -> None:
    contract = CONTRACT if kind == "bytes" else token_contract(max_tokens=24)
    texts = list(hostile_texts(NUM_TEXTS, seed=3))
    trained = encode_texts([text_of([text], contract) for text in texts], contract)
    body = json.dumps({"rows": [{"text": text} for text in texts]}).encode()
    served = decoded(body, NUM_TEXTS, contract)
    values = np.array([text.encode() for text in texts], object)
    tensor = Tensor("text", BYTES, values.shape, values)
    (payload,) = read_texts([tensor], contract, NUM_TEXTS, NUM_TEXTS)
    predicted = np.concatenate(list(TextReader(contract).read(texts, 512)[0]))
    for other in (served, decoded(payload, NUM_TEXTS, contract), predicted):
        np.testing.assert_array_equal(other, trained)
    # Tokens of rare characters are many, so more of the numbers at the ends are cut.
    assert len(np.unique(trained, axis=0)) > {"bytes": 0.9, "tokens": 0.5}[kind] * NUM_TEXTS


@pytest.mark.parametrize("contract", [CONTRACT, token_contract()])
def test_text_of_a_megabyte_is_cut_equally_in_training_and_serving(contract: TextContract) -> None:
    text = "e\u0301 \u5f88 " * 300_000
    trained = encode_texts([text_of([text], contract)], contract)
    body = json.dumps({"text": text}, ensure_ascii=False).encode()
    np.testing.assert_array_equal(decoded(body, 1, contract), trained)
    assert contract.remarks(trained) == [{"truncated": True}]


def test_text_reader_replaces_half_a_surrogate_pair() -> None:
    (row,) = next(TextReader(CONTRACT).read(f"a{HALF}b", 1)[0])
    assert row[:5].tobytes() == "a\ufffdb".encode()


@pytest.mark.process
def test_service_refuses_unreadable_texts_and_predicts_the_next_text(tmp_path: Path) -> None:
    refused = {
        json.dumps({"text": "soup " * 2_000_000}): (422, "out_of_range"),
        '{"text": "half a pair \\ud83d"}': (400, "malformed_json"),
        '{"text": "\\u0000"}': (422, "missing_value"),
    }
    with ready_service(tmp_path, text_classifier()) as server:
        for body, (status, code) in refused.items():
            answer = plain_http.post(
                f"{server.url}/predict",
                content=body.encode(),
                headers={"content-type": "application/json"},
            )
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
            odd = {"text": "\u202eright to left\0<script>alert(1)</script>"}
            answer = plain_http.post(f"{server.url}/predict", json=odd)
            assert (answer.status_code, answer.json()["truncated"]) == (200, False)
