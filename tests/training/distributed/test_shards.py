"""Tests of operations on tensors that processes divide over different meshes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.utils import get_total_norm

from slipway.training.distributed.shards import by_division, num_parts, total_norm

pytestmark = pytest.mark.unit


@pytest.fixture(name="mesh")
def _mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    store = f"file://{tmp_path}/store"
    distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("copies", "shared"))
    finally:
        distributed.destroy_process_group()


def divided(mesh: DeviceMesh) -> list[Tensor]:
    """Tensors over both dimensions of `mesh`, over the copies only, and whole."""
    rows = torch.arange(12.0).reshape(6, 2)
    return [
        distribute_tensor(rows, mesh, [Shard(0), Shard(1)]),
        distribute_tensor(rows + 1, mesh["copies"], [Shard(0)]),
        rows + 2,
        distribute_tensor(rows + 3, mesh, [Shard(0), Replicate()]),
    ]


def test_tensors_are_grouped_by_the_mesh_that_divides_them(mesh: DeviceMesh) -> None:
    both, copies, whole, repeated = tensors = divided(mesh)
    groups = [[id(tensor) for tensor in group] for group in by_division(tensors)]
    assert groups == [[id(both), id(repeated)], [id(copies)], [id(whole)]]


def test_the_norm_covers_tensors_of_all_meshes_which_torch_alone_refuses_to_mix(
    mesh: DeviceMesh,
) -> None:
    tensors = divided(mesh)
    values = [torch.arange(12.0) + added for added in range(4)]
    torch.testing.assert_close(total_norm(tensors), torch.cat(values).norm())
    with pytest.raises((RuntimeError, ValueError), match=r"(?i)mesh|mixed"):
        get_total_norm(tensors)


def test_a_whole_tensor_has_one_part(mesh: DeviceMesh) -> None:
    assert [num_parts(tensor) for tensor in divided(mesh)] == [1, 1, 1, 1]
    assert num_parts(torch.zeros(3)) == 1
