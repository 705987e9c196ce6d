"""Tests of networks for texts: n-grams of whole words and characters; padding has no effect."""

from typing import Any

import numpy as np
import pytest
import torch

from slipway.inputs.texts import TextContract, encode_texts
from slipway.system.errors import ParamsError
from slipway.training.networks.networks import NetworkSpec, build_network, example_rows
from slipway.training.networks.text_networks import HashedNgrams, TextNetwork, _words
from slipway.training.recipe.precision import adapt_to_half
from tests.tokens import token_contract

pytestmark = pytest.mark.unit
CONTRACT = TextContract(kind="texts", columns=["text"], max_bytes=64, max_characters=None)
NGRAMS: dict[str, Any] = {
    "buckets": 4096,
    "width": 4,
    "word_ngrams": 2,
    "byte_ngrams": [2, 3],
    "lowercase": True,
    "dropout": 0.0,
}
TRANSFORMER = {"width": 16, "num_layers": 1, "num_heads": 2, "patch": 4, "dropout": 0.0}


TOKENS = token_contract()


def network(
    name: str = "hashed_ngrams", contract: TextContract = CONTRACT, **changes: Any
) -> TextNetwork:
    torch.manual_seed(1)
    arguments = {"hashed_ngrams": NGRAMS, "small_transformer": TRANSFORMER}[name] | changes
    built = build_network(
        NetworkSpec(
            task="text_classification",
            name=name,
            arguments=arguments,
            classes=["a", "b", "c"],
            input=contract,
            mean=[],
            std=[],
            target_scale=None,
        )
    )
    assert isinstance(built, TextNetwork)
    return built.eval()


def rows(*texts: str) -> torch.Tensor:
    return torch.from_numpy(encode_texts(texts, CONTRACT))


def families(text: str, **changes: Any) -> list[list[int]]:
    """Return the hash buckets of each family of n-grams, without those of padding."""
    bag = network(**changes).backbone
    assert isinstance(bag, HashedNgrams)
    found = bag.families(rows(text).to(torch.int64))
    return [[int(bucket) for bucket in family[0] if bucket] for family in found]


@pytest.mark.parametrize("name", ["hashed_ngrams", "small_transformer"])
def test_the_output_for_a_text_does_not_depend_on_the_other_texts_of_its_batch(name: str) -> None:
    batch = rows("a", "some words, and more", "x" * 70, "\u5f88\u597d\u5403")
    built = network(name)
    with torch.inference_mode():
        together = built(batch)
        alone = torch.cat([built(batch[place : place + 1]) for place in range(len(batch))])
    np.testing.assert_allclose(together, alone, atol=1e-6)
    assert len({tuple(np.round(row, 6)) for row in together.tolist()}) == len(batch)


def test_a_token_transformers_output_depends_on_each_token_but_not_on_padding() -> None:
    texts = ["a", "the soup was cold", "the soup was late", "x y " * 20]
    batch = torch.from_numpy(encode_texts(texts, TOKENS))
    built = network("small_transformer", TOKENS, patch=1)
    with torch.inference_mode():
        together = built(batch)
        alone = torch.cat([built(batch[place : place + 1]) for place in range(len(batch))])
        cut = built(batch[:3, : int(batch[:3].any(dim=0).sum())])
    np.testing.assert_allclose(together, alone, atol=1e-6)
    np.testing.assert_allclose(together[:3], cut, atol=1e-6)
    assert len({tuple(np.round(row, 6)) for row in together.tolist()}) == len(batch)


def test_a_transformer_refuses_tokens_unless_its_patch_size_is_one() -> None:
    with pytest.raises(ParamsError, match=r"patch is 4, .* Set it to 1"):
        network("small_transformer", TOKENS)


def test_hashed_ngrams_refuse_tokens() -> None:
    with pytest.raises(ParamsError, match=r"the packed store has tokens\. Set precompute"):
        network("hashed_ngrams", TOKENS)


def test_text_networks_give_finite_outputs_for_a_row_of_padding() -> None:
    for name in ("hashed_ngrams", "small_transformer"):
        assert torch.isfinite(network(name)(torch.zeros((2, 64), dtype=torch.uint8))).all()


def test_byte_ngrams_consist_of_whole_characters() -> None:
    two, three, _, _ = families("\u5f88\u597d")
    assert (two, len(three)) == ([], 2)
    assert [len(family) for family in families("abcd")[:2]] == [3, 2]


def test_equal_words_have_equal_hashes_at_any_position() -> None:
    the, cat, other_the, dog, end = _words(rows("the cat, the dog").to(torch.int64))[0][:5]
    assert the == other_the
    assert len({int(word) for word in (the, cat, dog, end)}) == 4
    assert end == 0
    assert _words(rows("dog").to(torch.int64))[0][0] == dog


def test_word_hashes_depend_on_the_order_of_letters_and_the_end_of_long_words() -> None:
    texts = ["tea", "eat", "x" * 40 + "a", "x" * 40 + "b"]
    hashes = [int(_words(rows(text).to(torch.int64))[0][0]) for text in texts]
    assert len(set(hashes)) == 4


def test_hashes_of_word_pairs_depend_on_the_order_of_the_words() -> None:
    assert families("good bad")[3] != families("bad good")[3]
    assert sorted(families("good bad")[2]) == sorted(families("bad good")[2])


def test_text_networks_ignore_upper_case_only_if_configured() -> None:
    assert families("FREE") == families("free")
    assert families("FREE", lowercase=False) != families("free", lowercase=False)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("hashed_ngrams", {"word_ngrams": 0, "byte_ngrams": []}, "expected one length or more"),
        ("hashed_ngrams", {"byte_ngrams": [3, 3]}, "expected each length once"),
        ("small_transformer", {"num_heads": 3}, "expected a divisor of width 16"),
    ],
)
def test_text_network_arguments_that_do_not_fit_are_refused(
    name: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ParamsError, match=message):
        network(name, **change)


@pytest.mark.parametrize("name", ["hashed_ngrams", "small_transformer"])
def test_text_networks_distinguish_all_byte_values_in_half_precision(name: str) -> None:
    rows = example_rows(network(name).spec, 2)
    rows[:, :3] = torch.tensor([201, 203, 205])  # no numbers of bfloat16
    whole, half = network(name)(rows), network(name)
    adapt_to_half(half, torch.bfloat16)
    for weight in half.parameters():
        weight.data = weight.data.to(torch.bfloat16)
    assert torch.allclose(half(rows).float(), whole, atol=0.02)
