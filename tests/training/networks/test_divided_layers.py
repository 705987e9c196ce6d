"""Tests of the layers that processes can share, and of refused networks."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from slipway.system.errors import ParamsError
from slipway.training.networks.blocks import parallel_blocks
from slipway.training.networks.divided_layers import (
    DividedLayer,
    check_layers,
    narrow,
    narrowed,
)
from slipway.training.networks.networks import Network
from slipway.training.networks.text_networks import TextNetwork
from tests.encoder_folders import SIZES, tiny_encoder
from tests.training.networks.test_encoders import loaded
from tests.training.networks.test_text_networks import network

pytestmark = pytest.mark.unit
TRANSFORMER: dict[str, Any] = {"width": 32, "num_heads": 4, "num_layers": 2}


def transformer(**changes: Any) -> TextNetwork:
    return network("small_transformer", **(TRANSFORMER | changes))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry, self.exit = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, rows: Tensor) -> Tensor:
        answer: Tensor = rows + self.exit(self.entry(rows).relu())
        return answer


class _FixedBlock(_Block):
    def forward(self, rows: Tensor) -> Tensor:
        answer: Tensor = self.exit(self.entry(rows).reshape(len(rows), 16))
        return answer


class _Named(nn.Module):
    """A user's network that names the layers of its blocks."""

    def __init__(self, entry: str = "entry", block: type[_Block] = _Block) -> None:
        super().__init__()
        self._entry = entry
        self.first = nn.Linear(64, 8)
        self.blocks = nn.ModuleList([block() for _ in range(2)])
        self.head = nn.Linear(8, 3)

    def forward(self, places: Tensor) -> Tensor:
        rows = self.first(places.float())
        for block in self.blocks:
            rows = block(rows)
        answer: Tensor = self.head(rows)
        return answer

    def parallel_blocks(self) -> list[nn.Module]:
        return list(self.blocks)

    def parallel_layers(self) -> list[DividedLayer]:
        return [DividedLayer(self._entry, "outputs", 16), DividedLayer("exit", "inputs", 16)]


def own(backbone: nn.Module) -> Network:
    return TextNetwork(backbone, network().spec)


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_each_process_holds_an_equal_share_of_a_transformers_heads(
    num_processes: int,
) -> None:
    whole = transformer()
    check_layers(whole, num_processes)
    narrow(whole, num_processes)
    block: Any = parallel_blocks(whole)[0]
    assert block.queries_keys_values.weight.shape == (96 // num_processes, 32)
    assert block.attended.weight.shape == (32, 32 // num_processes)
    assert block.layer[0].bias.shape == (64 // num_processes,)
    assert block.layer[2].bias.shape == (32,)


def test_a_narrowed_copy_has_half_of_a_blocks_layers_and_the_network_stays_whole() -> None:
    whole = transformer()
    share = narrowed(whole, 2)
    size, half = (
        sum(weight.numel() for weight in parallel_blocks(each)[0].parameters())
        for each in (whole, share)
    )
    # Queries, keys, values, their answer, twice the wide layer; no biases of layers by inputs.
    assert size - half == (8 * 32 * 32 + 3 * 32 + 64) // 2


@pytest.mark.parametrize(
    ("family", "rank"),
    [
        *((family, None) for family in SIZES),
        ("bert", 2),
        *(pytest.param(name, 2, marks=pytest.mark.nightly) for name in SIZES if name != "bert"),
    ],
)
def test_encoders_of_every_family_can_be_divided_over_processes(
    tmp_path: Path, family: str, rank: int | None
) -> None:
    encoder, _ = loaded(tiny_encoder(tmp_path, family), lora_rank=rank)
    check_layers(encoder, 2)
    with pytest.raises(ParamsError, match="4 processes cannot equally share the 2 heads"):
        check_layers(encoder, 4)


def test_error_for_an_uneven_division_names_the_possible_numbers_of_processes() -> None:
    with pytest.raises(ParamsError, match=r"5 processes .* 12 heads .* Use 2 or 3 or 4 or 6 or 12"):
        check_layers(transformer(width=48, num_heads=12), 5)


def test_fused_outputs_whose_inputs_copies_cannot_divide_equally_are_refused() -> None:
    check_layers(transformer(), 2, num_copies=2)
    with pytest.raises(
        ParamsError,
        match=r"model_parallel is 2, but 3 copies cannot equally divide the 32 inputs of "
        r"'queries_keys_values', .* 3 fused outputs .* divides 32, or use model_parallel: null, ",
    ):
        check_layers(transformer(), 2, num_copies=3)
    check_layers(own(_Named()), 2, num_copies=3)  # no fused outputs


def test_networks_that_name_no_parallel_layers_are_refused_with_alternatives() -> None:
    with pytest.raises(ParamsError, match=r"'hashed_ngrams'.*'small_transformer', 'encoder'"):
        check_layers(network(), 2)


def test_a_user_network_can_name_its_parallel_layers() -> None:
    check_layers(own(_Named()), 2)


def test_a_parallel_layer_that_the_block_lacks_is_refused() -> None:
    with pytest.raises(ParamsError, match=r"a _Block has no nn.Linear 'entrance' with 1 x 16"):
        check_layers(own(_Named(entry="entrance")), 2)


def test_a_block_that_cannot_compute_with_a_share_of_its_layers_is_refused() -> None:
    with pytest.raises(ParamsError, match="cannot compute with its share of the layers"):
        check_layers(own(_Named(block=_FixedBlock)), 2)
