"""Encoding of texts as tokens, with the tokenizer in the contract."""

import json

import numpy as np
import pytest

from slipway.inputs.contract import InputContract
from slipway.inputs.texts import TextContract, decode_row, encode_texts
from slipway.system.errors import BundleError
from tests.tokens import bpe, token_contract

pytestmark = pytest.mark.unit
SPECIAL = "<answer>"


def with_special_token() -> TextContract:
    content = json.loads(bpe())
    content["added_tokens"] = [
        {
            "id": 400,
            "content": SPECIAL,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
    ]
    return token_contract(tokenizer=json.dumps(content))


def test_a_row_of_tokens_has_their_ids_plus_one_padded_with_zeros() -> None:
    contract = token_contract()
    (row,) = encode_texts(["the soup"], contract)
    ids = contract.loaded_tokenizer.encode("the soup").ids
    assert (row.dtype, row.shape) == (np.int32, (16,))
    assert row.tolist() == [*(place + 1 for place in ids), *[0] * (16 - len(ids))]


@pytest.mark.parametrize("text", ["the soup was cold", "\u5f88\u597d\u5403", "e\u0301 \U0001f469"])
def test_every_short_text_survives_a_round_trip_through_tokens(text: str) -> None:
    contract = token_contract(max_tokens=64)
    (row,) = encode_texts([text], contract)
    assert decode_row(row, contract) == text


def test_text_is_marked_as_cut_if_it_exceeds_the_tokens_or_the_bytes() -> None:
    contract = token_contract()
    many = " ".join("abcdefgh")
    rows = encode_texts([many, f"{many} i j k", "the soup " * 8], contract)
    assert contract.remarks(rows) == [{"truncated": cut} for cut in (False, True, True)]
    assert (rows[:, 1:] >= 0).all()
    assert decode_row(rows[1], contract).endswith("...")


def test_texts_get_the_same_tokens_singly_as_in_a_long_batch() -> None:
    contract = token_contract()
    texts = [f"the train {number} was late" for number in range(200)]
    single = np.concatenate([encode_texts([text], contract) for text in texts])
    np.testing.assert_array_equal(encode_texts(texts, contract), single)


def test_name_of_a_special_token_in_a_text_is_tokenized_as_ordinary_text() -> None:
    contract = with_special_token()
    (row,) = encode_texts([SPECIAL], contract)
    assert 401 not in row.tolist()
    assert contract.vocabulary_size == 401
    assert decode_row(row, contract) == SPECIAL


def test_text_without_any_token_is_encoded_to_a_row_with_one_token() -> None:
    content = json.loads(bpe())
    content["normalizer"] = {"type": "Replace", "pattern": {"Regex": "."}, "content": ""}
    contract = token_contract(tokenizer=json.dumps(content))
    assert np.count_nonzero(encode_texts(["abc"], contract)) == 1


def test_description_of_a_contract_names_its_tokenizer_by_digest() -> None:
    described = token_contract().describe()["tokenizer"]
    assert (described["vocabulary_size"], described["max_tokens"]) == (400, 16)
    assert len(described["sha256"]) == 64
    assert token_contract(tokenizer=None, max_tokens=None).describe()["tokenizer"] is None


def test_stored_contract_contains_its_tokenizer() -> None:
    contract = token_contract()
    read = TextContract.model_validate_json(contract.model_dump_json())
    assert isinstance(read, InputContract)
    np.testing.assert_array_equal(encode_texts(["soup"], read), encode_texts(["soup"], contract))


def test_a_tokenizer_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(BundleError, match="expected the content of"):
        token_contract(tokenizer='{"model": 1}').require_usable()
