"""Tests of the methods by which a network names its blocks: equal outputs, and refused stages."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipway.training.distributed.pipeline import Stage, empty_weight
from slipway.training.networks.blocks import stage_problem
from slipway.training.networks.image_networks import ImageNetwork
from slipway.training.networks.networks import Network, NetworkSpec, build_network
from tests.encoder_folders import SIZES
from tests.tokens import token_contract
from tests.training.conftest import spec
from tests.training.networks.test_text_networks import network as text_network

FAMILIES = SIZES | dict.fromkeys(("camembert", "xlm-roberta"), SIZES["roberta"])


def encoder(family: str, **changes: Any) -> Network:
    arguments = {
        "pooling": "mean",
        "dropout": 0.0,
        "lora_rank": None,
        "layer_decay": 1.0,
        "checkpoint_activations": False,
        "config": {"model_type": family, **FAMILIES[family]},
    }
    return build_network(
        NetworkSpec(
            task="text_classification",
            name="encoder",
            arguments=arguments | changes,
            classes=["a", "b"],
            input=token_contract(),
            mean=[],
            std=[],
            target_scale=None,
        )
    )


def tokens(num_rows: int) -> Tensor:
    """Return drawn token ids plus 1 (B, L), each row with another length."""
    rows = torch.randint(1, 200, (num_rows, token_contract().shape[0]))
    for row in range(num_rows):
        rows[row, 4 + 3 * row :] = 0
    return rows.to(torch.int32)


def stages_of(network: Network, num_stages: int) -> list[Stage]:
    """Return the stages, each on a copy of the network without the weights of the others."""
    stages = []
    for index in range(num_stages):
        own = copy.deepcopy(network)
        stages.append(Stage(own, index, num_stages))
        for name, weight in own.named_parameters():
            if name not in stages[-1].own_names:
                empty_weight(weight)
    return stages


def by_stages(stages: list[Stage], rows: Tensor) -> Tensor:
    values = rows
    for stage in stages:
        values = stage(values, rows)
    return values


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, values: Tensor) -> Tensor:
        return values + torch.relu(self.layer(values))


class Staged(nn.Module):
    """A network of a user's for images, whose blocks pass on (B, width, H, W)."""

    blocks: Any  # mypy sees only modules in a list

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.entry = nn.Conv2d(1, width, 1)
        self.blocks = nn.ModuleList([Residual(width), Residual(width)])
        self.norm, self.head = nn.GroupNorm(1, width), nn.Linear(width, 2)

    def forward(self, images: Tensor) -> Tensor:
        values = self.before_blocks(images)
        for block in self.parallel_blocks():
            values = block(values)
        return self.after_blocks(values, images)

    def parallel_blocks(self) -> list[nn.Module]:
        return list(self.blocks)

    def before_blocks(self, images: Tensor) -> Tensor:
        values: Tensor = self.entry(images)
        return values

    def after_blocks(self, values: Tensor, images: Tensor) -> Tensor:
        answer: Tensor = self.head(self.norm(values).mean(dim=(2, 3)))
        return answer

    def after_modules(self) -> list[nn.Module]:
        return [self.norm, self.head]


class Shrinking(Staged):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = nn.Sequential(Residual(4), nn.AvgPool2d(2))


class WithBatchNorm(Staged):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = nn.Sequential(Residual(4), nn.BatchNorm2d(4))


class Forgetful(Staged):
    def after_modules(self) -> list[nn.Module]:
        return [self.head]


class OtherForward(Staged):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) + 1


class Biased(Staged):
    """Its blocks take a value that depends on a weight, which only one process holds."""

    def block_arguments(self, images: Tensor) -> list[tuple[Tensor]]:
        return [(self.entry.weight,)] * 2


class TooFew(Staged):
    def block_arguments(self, images: Tensor) -> list[tuple[()]]:
        return [()]


class Outside(Staged):
    """Its blocks are wrapped, so they use weights of modules that are no blocks."""

    def parallel_blocks(self) -> list[nn.Module]:
        return [_Calls(block) for block in self.blocks]


class _Calls(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.blocks = (block,)  # a tuple, so torch does not see it

    def forward(self, values: Tensor) -> Tensor:
        answer: Tensor = self.blocks[0](values)
        return answer


class Tied(Staged):
    def after_modules(self) -> list[nn.Module]:
        return [self.norm, self.head, self.entry]


class Pair(Staged):
    def before_blocks(self, images: Tensor) -> Any:
        return images, images


@pytest.mark.process
@pytest.mark.parametrize("family", FAMILIES)
def test_an_encoder_by_its_blocks_has_the_states_of_transformers_bit_for_bit(family: str) -> None:
    network, rows = encoder(family).eval(), tokens(3)
    backbone: Any = network.backbone
    places = network.backbone_inputs(rows)
    arguments = backbone.block_arguments(places)
    layers = backbone.parallel_blocks()
    masks = arguments[0][0]
    if family == "modernbert":
        kinds = [layer.attention_type for layer in layers]
        assert len(set(kinds)) == 2
        masks = {kind: each[0] for kind, each in zip(kinds, arguments, strict=True)}
        assert not torch.equal(*masks.values())
    ids = torch.where(places > 0, places - 1, 1)
    with torch.no_grad():
        states = backbone.encoder(input_ids=ids, attention_mask=masks).last_hidden_state
        weights = (places > 0)[:, :, None].float()
        expected = backbone.head((states * weights).sum(dim=1) / weights.sum(dim=1))
        assert torch.equal(backbone(places), expected)


@pytest.mark.process
@pytest.mark.parametrize("lora_rank", [None, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_stages_without_the_weights_of_others_answer_and_learn_like_the_whole_encoder(
    family: str, lora_rank: int | None
) -> None:
    network, rows = encoder(family, lora_rank=lora_rank, checkpoint_activations=True), tokens(3)
    for module in network.train().modules():  # evaluation would not checkpoint activations
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    stages = stages_of(network, 2)
    for answers in (by_stages(stages, rows), network(rows)):
        total: Any = answers.sum()
        total.backward()
    torch.testing.assert_close(by_stages(stages, rows), network(rows), rtol=0, atol=1e-6)
    for stage in stages:
        for name, weight in stage._network.named_parameters():
            whole = dict(network.named_parameters())[name]
            if name in stage.own_names:
                assert (weight.grad is None) == (whole.grad is None), name
                if whole.grad is not None:
                    torch.testing.assert_close(weight.grad, whole.grad, rtol=1e-4, atol=1e-5)
            else:
                assert not weight.numel()


def test_stages_of_a_transformer_and_of_an_own_network_for_images_answer_like_the_whole() -> None:
    transformer = text_network("small_transformer", num_layers=3).eval()
    texts = torch.randint(0, 200, (4, *transformer.spec.input.shape), dtype=torch.uint8)
    own = ImageNetwork(Staged(), spec()).eval()
    images = torch.randint(0, 255, (4, 8, 8, 1), dtype=torch.uint8)
    with torch.no_grad():
        for network, rows, number in ((transformer, texts, 3), (own, images, 2)):
            found = by_stages(stages_of(network, number), rows)
            torch.testing.assert_close(found, network(rows), rtol=0, atol=1e-6)


def test_activations_need_gradients_only_behind_the_first_stage_that_learns() -> None:
    network = text_network("small_transformer", num_layers=3)
    stages = [Stage(network, index, 3) for index in range(3)]

    def needing() -> list[tuple[bool, bool]]:
        first = stages[0].first_learning()
        examples = [stage.examples(2, first) for stage in stages]
        return [(given.requires_grad, made.requires_grad) for given, made in examples]

    assert needing() == [(False, True), (True, True), (True, True)]
    for name, weight in network.named_parameters():
        weight.requires_grad_(name in stages[2].own_names)
    assert needing() == [(False, False), (False, False), (False, True)]


@pytest.mark.parametrize(
    ("backbone", "problem"),
    [
        (Staged(), ""),
        (Shrinking(), r"block backbone.blocks.1 returns torch.float32 \(2, 4, 4, 4\) for torch.f"),
        (WithBatchNorm(), "statistics of backbone.blocks.1.1 would be those of a micro-batch"),
        (Forgetful(), r"after_blocks\(\) uses weights that are not in after_modules\(\)"),
        (OtherForward(), r"forward\(\) returns other outputs"),
        (Biased(), r"block_arguments\(\) uses weights"),
        (TooFew(), r"block_arguments\(\) returns 1 items, expected 2"),
        (Outside(), "uses weights outside it"),
        (Tied(), r"before_blocks\(\) uses weights of after_modules\(\)"),
        (Pair(), r"before_blocks\(\) returns tuple, expected one tensor"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_own_stages_that_a_pipeline_cannot_train_are_named(
    backbone: nn.Module, problem: str
) -> None:
    found = stage_problem(ImageNetwork(backbone, spec()))
    assert re.search(problem, found) if problem else found == ""
