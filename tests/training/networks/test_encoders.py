"""Tests of encoders from local folders: outputs, trained weights, and refused folders."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipway.config.params import mistakes_in
from slipway.config.training import TrainParams
from slipway.inputs.texts import (
    TextContract,
    encode_texts,
    normalised,
    read_text,
    read_tokenizer,
)
from slipway.system.errors import ParamsError
from slipway.training.networks.encoders import (
    EncoderBackbone,
    encoder_backbone,
    encoder_weights,
    load_encoder,
    merged,
    read_config,
)
from slipway.training.networks.frozen_parts import parts_of
from slipway.training.networks.initialization import initial_network
from slipway.training.networks.networks import Network, NetworkSpec, build_network
from slipway.training.recipe.optimizers import optimizer_and_schedule
from tests.encoder_folders import SIZES, tiny_encoder, word_piece
from tests.project_params import PROJECT, of_kind
from tests.tokens import bpe, token_contract

pytestmark = pytest.mark.process
ARGUMENTS = {
    "pooling": "mean",
    "dropout": 0.0,
    "lora_rank": None,
    "layer_decay": 1.0,
    "checkpoint_activations": False,
}
TEXTS = ["the soup", "a much longer text about the train that was late again", "x"]


def spec_of(folder: Path, contract: TextContract, **changes: Any) -> NetworkSpec:
    return NetworkSpec(
        task="text_classification",
        name="encoder",
        arguments={**ARGUMENTS, **changes, "config": read_config(folder)},
        classes=["a", "b"],
        input=contract,
        mean=[],
        std=[],
        target_scale=None,
    )


def loaded(
    folder: Path, contract: TextContract | None = None, **changes: Any
) -> tuple[Network, EncoderBackbone]:
    network = build_network(spec_of(folder, contract or token_contract(), **changes))
    load_encoder(network, folder)
    assert isinstance(network.backbone, EncoderBackbone)
    return network.eval(), network.backbone


def rows(*texts: str, contract: TextContract | None = None) -> torch.Tensor:
    return torch.from_numpy(encode_texts(texts, contract or token_contract()))


def test_the_new_head_of_an_encoder_starts_with_answers_near_zero(tmp_path: Path) -> None:
    folder = tiny_encoder(tmp_path, "bert")
    network = initial_network(
        7, train_params(pretrained=str(folder)), spec_of(folder, token_contract())
    )
    assert isinstance(network.backbone, EncoderBackbone)
    weight, bias = network.backbone.head.weight.detach(), network.backbone.head.bias.detach()
    assert 0.005 < weight.std() < 0.02
    assert not bias.any()


def train_params(**changes: Any) -> TrainParams:
    return PROJECT.train.model_copy(
        update={
            "network": "encoder",
            "network_arguments": ARGUMENTS,
            "pretrained": "folder",
            **changes,
        }
    )


def one_step(network: Network, params: TrainParams, batch: torch.Tensor) -> None:
    network.train()
    optimizer: Any = optimizer_and_schedule(network, params, 10)["optimizer"]
    loss: Any = torch.nn.functional.cross_entropy(network(batch), torch.ones(len(batch)).long())
    loss.backward()
    optimizer.step()
    network.eval()


@pytest.mark.parametrize("family", SIZES)
def test_encoder_outputs_equal_those_of_transformers_with_any_padding(
    tmp_path: Path, family: str
) -> None:
    import transformers

    folder = tiny_encoder(tmp_path, family)
    network, backbone = loaded(folder)
    plain: Any = transformers.AutoModel.from_pretrained(folder).eval()
    batch = rows(*TEXTS)
    is_there = (batch != 0).long()
    ids = torch.where(batch != 0, batch.abs() - 1, 1)
    with torch.inference_mode():
        states = plain(input_ids=ids, attention_mask=is_there).last_hidden_state
        means = (states * is_there[:, :, None]).sum(1) / is_there.sum(1, keepdim=True)
        np.testing.assert_allclose(network(batch), backbone.head(means), atol=1e-5)
        alone = torch.cat([network(batch[place : place + 1]) for place in range(len(batch))])
        np.testing.assert_allclose(network(batch), alone, atol=1e-5)
        assert torch.isfinite(network(torch.zeros_like(batch))).all()


@pytest.mark.parametrize(
    ("family", "own", "millions"),
    [
        ("bert", {"vocab_size": 30_522}, 108.9),
        ("bert", {"vocab_size": 21_128}, 101.7),  # of the Chinese one
        ("roberta", {"vocab_size": 50_265, "max_position_embeddings": 514}, 124.1),
    ],
)
def test_an_encoder_of_a_real_size_is_built_from_its_config(
    family: str, own: dict[str, Any], millions: float
) -> None:
    spec = NetworkSpec(
        task="text_classification",
        name="encoder",
        arguments={**ARGUMENTS, "config": {"model_type": family, "type_vocab_size": 1, **own}},
        classes=["a", "b"],
        input=token_contract(),
        mean=[],
        std=[],
        target_scale=None,
    )
    with torch.device("meta"):
        backbone = encoder_backbone(spec)
    counted = sum(weight.numel() for weight in backbone.parameters())
    assert counted / 1e6 == pytest.approx(millions, abs=0.1)


def test_a_tokenizer_like_berts_reads_english_and_chinese(tmp_path: Path) -> None:
    folder = tiny_encoder(tmp_path, "bert", word_piece())
    contract = token_contract(tokenizer=read_tokenizer(folder), max_tokens=8)
    network, _ = loaded(folder, contract, pooling="first")
    batch = rows("ABC [SEP]", "\u5f88\u597d\u5403", "\u5f88\u5403\u597d", contract=contract)
    assert batch[1].tolist() == [3, 57, 58, 59, 4, 0, 0, 0]
    assert batch[0].tolist().count(4) == 1  # the name in the text is ordinary text
    answers = network(batch)
    assert len({tuple(row) for row in answers.round(decimals=5).tolist()}) == 3


def byte_pairs() -> str:
    """Return a tokenizer like RoBERTa's, which gives both texts of a pair the same token type."""
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_str(bpe())
    tokenizer.add_special_tokens(["<s>", "</s>"])
    marks = [tokenizer.token_to_id(name) or 0 for name in ("</s>", "<s>")]
    tokenizer.post_processor = processors.RobertaProcessing(
        ("</s>", marks[0]), ("<s>", marks[1]), add_prefix_space=False
    )
    content: str = tokenizer.to_str()
    return content


@pytest.mark.parametrize(
    ("family", "tokenizer"),
    [
        ("bert", word_piece()),
        ("electra", word_piece()),
        ("distilbert", word_piece()),
        ("roberta", byte_pairs()),
    ],
)
def test_a_pair_of_texts_has_the_same_tokens_types_and_outputs_as_in_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, tokenizer: str
) -> None:
    import transformers

    monkeypatch.setitem(SIZES[family], "vocab_size", 420)
    folder = tiny_encoder(tmp_path, family, tokenizer)
    contract = token_contract(
        tokenizer=read_tokenizer(folder), columns=["a", "b"], is_pair=True, max_tokens=16
    )
    network, backbone = loaded(folder, contract)
    pairs = [("the soup", "is hot"), ("", "x"), ("y", ""), ("longer " * 6, "than " * 5)]
    texts = [read_text({"a": a, "b": b}, contract) for a, b in pairs]
    batch = rows(*texts, contract=contract)
    fast: Any = transformers.PreTrainedTokenizerFast
    given = fast(tokenizer_file=str(folder / "tokenizer.json"), pad_token="[PAD]")(
        [normalised(a) for a, _ in pairs],
        [normalised(b) for _, b in pairs],
        truncation=True,
        max_length=16,
        padding="max_length",
        return_tensors="pt",
        return_token_type_ids=True,
    )
    there = given["attention_mask"]
    assert (torch.where(there > 0, given["input_ids"] + 1, 0) == batch.abs()).all()
    assert (batch[:, 0] < 0).tolist() == [False, False, False, True]
    types = {"token_type_ids": given["token_type_ids"]} if family != "distilbert" else {}
    assert bool(given["token_type_ids"].any()) == (family != "roberta")
    plain: Any = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        ids = torch.where(there > 0, given["input_ids"], 1)
        states = plain(ids, there, **types).last_hidden_state
        means = (states * there[:, :, None]).sum(1) / there.sum(1, keepdim=True)
        np.testing.assert_allclose(network(batch), backbone.head(means), atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "roberta"])
@pytest.mark.parametrize("head", ["MaskedLM", "SequenceClassification"])
def test_an_encoder_is_read_from_the_folder_of_a_model_with_any_head(
    tmp_path: Path, family: str, head: str
) -> None:
    import transformers

    folder = tiny_encoder(tmp_path, family)
    plain, _ = loaded(folder)
    model: Any = getattr(transformers, f"AutoModelFor{head}")
    model.from_pretrained(folder).save_pretrained(folder)
    headed, backbone = loaded(folder)
    backbone.head.load_state_dict(plain.backbone.get_submodule("head").state_dict())
    with torch.inference_mode():
        np.testing.assert_allclose(headed(rows(*TEXTS)), plain(rows(*TEXTS)), atol=1e-6)


@pytest.mark.parametrize("family", SIZES)
def test_lora_trains_only_adapters_and_head_and_merging_keeps_the_outputs(
    tmp_path: Path, family: str
) -> None:
    network, _ = loaded(tiny_encoder(tmp_path, family), lora_rank=2)
    trained = {name for name, weight in network.named_parameters() if weight.requires_grad}
    assert {"lora_" in name or ".head." in name for name in trained} == {True}
    batch = rows(*TEXTS)
    before = {name: weight.clone() for name, weight in network.named_parameters()}
    for _ in range(2):  # after the first step only one of both factors has moved
        one_step(network, train_params(learning_rate=0.05), batch)
    changed = {
        name for name, weight in network.named_parameters() if not weight.equal(before[name])
    }
    assert changed == trained
    whole = merged(network)
    assert whole.spec.arguments["lora_rank"] is None
    assert not any("lora" in name or "base_layer" in name for name in whole.state_dict())
    with torch.inference_mode():
        np.testing.assert_allclose(whole.eval()(batch), network(batch), atol=1e-5)
    read = build_network(whole.spec)
    read.load_payload(whole.payload())
    assert merged(read) is read


def test_activation_checkpointing_gives_the_same_gradients(tmp_path: Path) -> None:
    folder, batch = tiny_encoder(tmp_path), rows(*TEXTS)
    found = []
    for checkpoints in (False, True):
        torch.manual_seed(1)
        network, backbone = loaded(folder, checkpoint_activations=checkpoints)
        assert backbone.encoder.is_activation_checkpointing == checkpoints
        torch.manual_seed(1)
        loss: Any = network.train()(batch).sum()
        loss.backward()
        found.append([weight.grad for weight in network.parameters()])
    for plain, checkpointed in zip(*found, strict=True):
        assert plain is not None
        np.testing.assert_allclose(plain, checkpointed, atol=1e-6)


def test_layer_decay_lowers_the_learning_rate_from_each_layer_to_the_one_before(
    tmp_path: Path,
) -> None:
    network, _ = loaded(tiny_encoder(tmp_path))
    params = train_params(
        network_arguments={**ARGUMENTS, "layer_decay": 0.5}, learning_rate=1.0, warmup_epochs=0.0
    )
    optimizer: Any = optimizer_and_schedule(network, params, 10)["optimizer"]
    names = {id(weight): name for name, weight in network.named_parameters()}
    rates = {
        names[id(weight)]: group["lr"]
        for group in optimizer.param_groups
        for weight in group["params"]
    }
    assert len(rates) == len(names)
    found = {
        part: {rate for name, rate in rates.items() if part in name}
        for part in (".embeddings.", ".layer.0.", ".layer.1.", ".head.")
    }
    assert found == {
        ".embeddings.": {0.125},
        ".layer.0.": {0.25},
        ".layer.1.": {0.5},
        ".head.": {1.0},
    }


@pytest.mark.parametrize("family", SIZES)
def test_the_parts_of_an_encoder_hold_each_parameter_exactly_once(
    tmp_path: Path, family: str
) -> None:
    network, _ = loaded(tiny_encoder(tmp_path, family))
    parts = parts_of(network)
    assert len(parts) == 4
    assert all(parts)
    names = [name for part in parts for name in part]
    assert sorted(names) == sorted(name for name, _ in network.named_parameters())
    assert {name for name in parts[-1] if ".head." in name} == {
        "backbone.head.weight",
        "backbone.head.bias",
    }


def test_encoder_weights_that_lack_a_layer_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tiny_encoder(tmp_path)
    state = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in state.items() if ".layer.1." not in name}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ParamsError, match=r"train\.pretrained lacks .*layer\.1"):
        loaded(folder)


def test_a_packed_store_made_with_another_tokenizer_than_the_encoders_is_refused(
    tmp_path: Path,
) -> None:
    folder = tiny_encoder(tmp_path, tokenizer=word_piece())
    with pytest.raises(ParamsError, match="whose tokenizer is not that of the packed store"):
        loaded(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 300}, "has 400 tokens, but the encoder in train.pretrained has only 300"),
        ({"max_position_embeddings": 10}, "reads at most 10. Set it to 10 or less"),
        ({"hidden_size": 15}, "cannot build the encoder described by config.json"),
    ],
)
def test_an_encoder_config_that_does_not_fit_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    spec = spec_of(tiny_encoder(tmp_path), token_contract())
    arguments = {**spec.arguments, "config": {**spec.arguments["config"], **change}}
    with pytest.raises(ParamsError, match=message):
        build_network(spec.model_copy(update={"arguments": arguments}))


@pytest.mark.unit
def test_an_encoder_folder_with_only_pickled_weights_is_refused_with_their_names(
    tmp_path: Path,
) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(ParamsError, match=r"pytorch_model\.bin is not read, because loading it"):
        encoder_weights(tmp_path)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"config\.json cannot be read"),
        ("[", r"config\.json cannot be read"),
        ('{"model_type": "gpt2"}', "a model of the type 'gpt2', expected an encoder: bert"),
        ("[]", "a model of the type None, expected an encoder"),
    ],
)
def test_a_folder_without_the_config_of_an_encoder_is_refused(
    tmp_path: Path, content: str | None, message: str
) -> None:
    if content:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ParamsError, match=message):
        read_config(tmp_path)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train.pretrained": None}, "expected a folder with config.json, model.safetensors"),
        (
            {"precompute.tokenizer": None, "precompute.max_tokens": None},
            "set tokenizer to train.pretrained, 'models/bert'",
        ),
        ({"train.freeze_epochs": 1}, "lora_rank is set, which freezes the encoder itself"),
    ],
)
def test_params_that_an_encoder_cannot_use_are_refused(
    change: dict[str, Any], message: str
) -> None:
    content = of_kind(PROJECT.model_dump(mode="json"), "text_classification")
    content["data"] |= {"text_columns": ["text"]}
    content["precompute"] |= {"tokenizer": "models/bert", "max_tokens": 64}
    content["train"] |= {
        "network": "encoder",
        "network_arguments": {**ARGUMENTS, "lora_rank": 4},
        "pretrained": "models/bert",
    }
    assert mistakes_in(content) == []
    for key, value in change.items():
        section, name = key.split(".")
        content[section][name] = value
    assert message in "\n".join(mistakes_in(content))
