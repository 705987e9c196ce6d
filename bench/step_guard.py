"""Measures the cost of the non-finite guard: forward, backward and AdamW with and without it.

`python -m bench.step_guard` prints and writes one table. Without the guard, torch's
`clip_grad_norm_` clips the gradient.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from bench.conditions import conditions
from slipway.config.params import load_params
from slipway.inputs.images import ImageContract
from slipway.system import files
from slipway.training.batches.batches import Batch
from slipway.training.networks.networks import NetworkSpec, build_network
from slipway.training.recipe.nonfinite import NonFiniteGuard

RESULT = Path("bench/results/step_guard.md")
NUM_ROUNDS, STEPS_PER_ROUND = 15, 2
NETWORKS: tuple[tuple[str, dict[str, Any], int, int], ...] = (
    (
        "small_resnet",
        {
            "width": 32,
            "blocks": [1, 1, 1],
            "dropout": 0.0,
            "stochastic_depth": 0.0,
            "normalisation": "batch",
        },
        8,
        128,
    ),
    ("timm/resnet18", {}, 32, 32),
)


@dataclass(frozen=True)
class Step:
    """A network and a batch to take steps with."""

    network: nn.Module
    batch: Batch
    device: torch.device

    def losses(self) -> Tensor:
        return nn.functional.cross_entropy(
            self.network(self.batch.inputs).float(), self.batch.targets, reduction="none"
        )


def main() -> None:
    """Measure every network and write the table."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lines = [
        "| network | pixels | rows | ms without | ms with | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for name, arguments, size_px, num_rows in NETWORKS:
        without, with_guard = _measure(_step(name, arguments, size_px, num_rows, device))
        ratio = statistics.median(
            more / less for less, more in zip(without, with_guard, strict=True)
        )
        times = f"{statistics.median(without):.2f} | {statistics.median(with_guard):.2f}"
        lines.append(
            f"| {name} {arguments.get('width', '')} | {size_px} | {num_rows} | {times} | "
            f"{ratio:.3f} |"
        )
        print(lines[-1], flush=True)
    rounds = (
        f"Medians of {NUM_ROUNDS} rounds of {STEPS_PER_ROUND} steps each way, in turns, on the "
        f"{device.type}."
    )
    files.write_text(
        RESULT,
        "\n".join(
            [
                "# What the guard of a step costs",
                "",
                *lines,
                "",
                rounds,
                "",
                conditions("torch"),
                "",
            ]
        ),
    )


def _step(
    name: str, arguments: dict[str, Any], size_px: int, num_rows: int, device: torch.device
) -> Step:
    contract = ImageContract(
        kind="images",
        transform=None,
        size_px=size_px,
        channels=3,
        resize_mode="stretch",
        interpolation="bilinear",
        max_pixels=10**6,
    )
    spec = NetworkSpec(
        task="image_classification",
        name=name,
        arguments=arguments,
        classes=list("abcdefghij"),
        input=contract,
        mean=[0.5] * 3,
        std=[0.25] * 3,
        target_scale=None,
    )
    images = torch.randint(0, 256, (num_rows, size_px, size_px, 3), dtype=torch.uint8)
    ones = torch.ones(num_rows, device=device)
    targets, rows = (
        torch.randint(0, 10, (num_rows,), device=device),
        torch.arange(num_rows, device=device),
    )
    batch = Batch(images.to(device), targets, ones, ones.bool(), rows, None, None)
    return Step(build_network(spec).to(device), batch, device)


def _measure(step: Step) -> tuple[list[float], list[float]]:
    """Return the milliseconds of a step, without and with the guard."""
    params = load_params(Path("params.yaml")).train.model_copy(update={"gradient_clip_norm": 1.0})
    guard = NonFiniteGuard(step.network, params, [str(row) for row in range(len(step.batch.rows))])
    optimizer = torch.optim.AdamW(step.network.parameters(), lr=1e-5)
    trainer: Any = SimpleNamespace(strategy=None, precision_plugin=None, accumulate_grad_batches=1)

    def plain() -> None:
        optimizer.zero_grad()
        step.losses().mean().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(step.network.parameters(), 1.0)
        optimizer.step()

    def guarded() -> None:
        optimizer.zero_grad()
        guard.start_batch()
        guard.checked_mean(step.losses(), step.batch).backward()  # type: ignore[no-untyped-call]
        guard.before_step(trainer)
        guard.clip(trainer, optimizer)
        optimizer.step()
        assert guard.after_step(trainer)

    for warm_up in (plain, guarded):
        _milliseconds(warm_up, step.device)
    rounds = [
        (_milliseconds(plain, step.device), _milliseconds(guarded, step.device))
        for _ in range(NUM_ROUNDS)
    ]
    return [without for without, _ in rounds], [with_guard for _, with_guard in rounds]


def _milliseconds(one: Callable[[], None], device: torch.device) -> float:
    begin = time.perf_counter()
    for _ in range(STEPS_PER_ROUND):
        one()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - begin) * 1000 / STEPS_PER_ROUND


if __name__ == "__main__":
    main()
