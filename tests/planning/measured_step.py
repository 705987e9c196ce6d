"""Measures the memory of real training steps in a fresh process.

`python -m tests.planning.measured_step NETWORK ARGUMENTS ROWS PRECISION` prints as JSON the bytes
that torch's profiler saw allocated at the peak, the growth of the resident set, and the prediction.
"""

import gc
import json
import sys
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from slipway.data.augmentation.plan import plan_from_params
from slipway.data.store.packed import PackedManifest
from slipway.planning.memory_plan import whole_step
from slipway.planning.rehearsal import Rehearsal
from slipway.planning.resource_plan import with_slack
from slipway.planning.step_memory import trace_step
from slipway.system.memory import own_bytes
from slipway.training.batches.batches import StepShape
from slipway.training.distributed.placement import TrainingHost, place
from slipway.training.job import TrainingData, network_spec
from slipway.training.networks.networks import build_network
from slipway.training.recipe.optimizers import update_of
from slipway.training.telemetry.telemetry import peak_bytes
from tests.packed_rows import packed_split
from tests.packed_tables import fit_contract, table
from tests.project_params import PROJECT, augment_params
from tests.training.conftest import CONTRACT

_SIZE_PX = 32


def training_data(network: str, num_rows: int) -> TrainingData:
    """Coloured noise of 32 px or rows of a table, in two classes."""
    facts: dict[str, Any] = {
        "format_version": 3,
        "classes": ["one", "two"],
        "target_scale": None,
        "splits": {},
    }
    if network == "tabm":
        contract = fit_contract(table(1000)[0])
        inputs: Any = (
            np.random.default_rng(0).random((num_rows, contract.shape[0]), dtype=np.float32).round()
        )
        manifest = PackedManifest(
            task="table_classification", input=contract, mean=[], std=[], **facts
        )
    else:
        images = CONTRACT.model_copy(update={"size_px": _SIZE_PX, "channels": 3})
        inputs = np.random.default_rng(0).integers(
            0, 256, (num_rows, _SIZE_PX, _SIZE_PX, 3), dtype=np.uint8
        )
        manifest = PackedManifest(
            task="image_classification", input=images, mean=[0.5] * 3, std=[0.25] * 3, **facts
        )
    ids = [f"{row:032x}" for row in range(num_rows)]
    split = packed_split(inputs, np.arange(num_rows) % 2, ids, ids)
    return TrainingData(manifest, [split], split, plan_from_params(augment_params(), 7))


def measure(network: str, arguments: dict[str, Any], rows: int, precision: str) -> dict[str, float]:
    """Return the predicted and allocated bytes of tensors, and the growth of the resident set."""
    changes = {
        "network": network,
        "network_arguments": arguments,
        "precision": precision,
        "strategy": "single",
        "devices": 1,
    }
    params = PROJECT.train.model_copy(update=changes | {"accelerator": "cpu", "num_nodes": 1})
    data = training_data(network, 2 * rows)
    half = torch.bfloat16 if precision == "bf16-mixed" else None
    placement = place(params, TrainingHost(0, True, None))
    network_ = build_network(network_spec(params, data.manifest))
    predicted = trace_step(network_, params, rows, half=half, update=update_of(placement))
    gc.collect()
    before = own_bytes()
    rehearsal = Rehearsal(7, params, data, placement, StepShape(rows, rows, 1, 1))
    for index in range(3):
        rehearsal.step(index)
    grown = peak_bytes(on_gpu=False) - before
    # The gradients of the last step, which are as large as the parameters, exist as well.
    held = 2 * predicted.parameters + predicted.optimizer + predicted.buffers
    return {
        "predicted": predicted.peak,
        "allocated": held + _allocated(rehearsal),
        "process": with_slack(whole_step(predicted)),
        "grown": grown,
    }


def _allocated(rehearsal: Rehearsal) -> int:
    """Return the peak of a step's tensors above the memory before it, as the allocator reports it.

    A block that is freed before any other event is a kernel's scratch memory. Its size depends on
    the processor's instruction set (75 MB for ResNet-18 with AVX2, none with AVX-512), and the
    prediction is of tensors: it does not count.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        rehearsal.step(4)
    return peak_of_events(profiler)


def peak_of_events(profiler: Any, *, with_scratch: bool = False) -> int:
    """Return the peak of the tensors above the memory before the profile.

    Memory that is freed before any other event counts only if `with_scratch` is True.
    """
    events = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    sizes: list[int] = []
    for event in sorted(events, key=lambda event: event.start_ns()):
        if sizes and sizes[-1] == -event.nbytes() > 0 and not with_scratch:
            sizes.pop()
        else:
            sizes.append(event.nbytes())
    return int(np.cumsum(sizes).max(initial=0))


if __name__ == "__main__":
    name, text, num_rows, asked = sys.argv[1:]
    print(json.dumps(measure(name, json.loads(text), int(num_rows), asked)))
