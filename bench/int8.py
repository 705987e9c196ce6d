"""Measures the speed of int8 against fp32 on the CPU for resnet18, and the accuracy it loses.

`python -m bench.int8` trains timm's resnet18 from scratch on a part of CIFAR-10 (../shared/data,
32 px), quantizes it with the code of `export`, and compares both on unseen rows. It measures the
speed of the same weights at 32 and at 224 px, in turns.
"""

import io
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.nn import functional

from bench.conditions import conditions
from slipway.artifacts.bundle import Metric, OutputContract
from slipway.config.params import load_params
from slipway.export.certification.timings import Timings, measure_in_turns
from slipway.export.graphs.graph import export_graph
from slipway.export.graphs.int8_search import search
from slipway.export.graphs.quantization import CPU, StaticQuantizer
from slipway.export.precision.leaderboard import metric_loss
from slipway.inputs.images import ImageContract
from slipway.metrics.scores import Resampling
from slipway.reports.console import size
from slipway.reports.pages.leaderboard_page import times_text
from slipway.runtimes.cpu_int8 import int8_instructions, weight_bits
from slipway.runtimes.runtime import open_onnx, run_in_batches
from slipway.system import files
from slipway.training.networks.networks import Network, NetworkSpec, build_network
from tests.calibrations import calibrated

DATA = Path("../shared/data/cifar10")
RESULT = Path("bench/results/int8.md")
HEADINGS = {8: "With VNNI", 7: "Without VNNI"}  # by the number of bits of a weight
NUM_TRAIN, NUM_VALIDATION, NUM_CALIBRATION = 10_000, 5_000, 512
EPOCHS, BATCH_SIZE = 4, 64
LARGEST_BATCH, LIMIT_S = 32, 90.0
COLUMNS = (
    "Input",
    "Batch",
    "fp32, rows/s",
    "int8, rows/s",
    "int8 / fp32",
    "One row, fp32, ms",
    "One row, int8, ms",
    "int8 / fp32, one row",
)


def read_rows(name: str, num_rows: int) -> tuple[NDArray[np.uint8], NDArray[np.int64], list[str]]:
    """Read images (rows, 32, 32, 3) uint8, class indices (rows,), and the classes."""
    table = pq.read_table(DATA / name)
    classes = sorted(set(table["label"].to_pylist()))
    chosen = np.sort(np.random.default_rng(7).permutation(table.num_rows)[:num_rows])
    rows = table.take(chosen).to_pylist()
    images = np.stack(
        [np.asarray(Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB")) for row in rows]
    )
    return images, np.array([classes.index(row["label"]) for row in rows]), classes


def contract(size_px: int) -> ImageContract:
    """Return the contract of RGB images, stretched to size."""
    return ImageContract(
        kind="images",
        transform=None,
        size_px=size_px,
        channels=3,
        resize_mode="stretch",
        interpolation="bilinear",
        max_pixels=10**6,
    )


def specification(size_px: int, classes: list[str]) -> NetworkSpec:
    """Return the spec of timm's resnet18 for CIFAR-10's classes."""
    facts: dict[str, Any] = {
        "mean": [0.49, 0.48, 0.45],
        "std": [0.25, 0.24, 0.26],
        "target_scale": None,
    }
    return NetworkSpec(
        task="image_classification",
        name="timm/resnet18",
        arguments={},
        classes=classes,
        input=contract(size_px),
        **facts,
    )


def train(images: NDArray[np.uint8], labels: NDArray[np.int64], classes: list[str]) -> Network:
    """Train a few epochs with flips and a cosine schedule."""
    torch.manual_seed(7)
    network = build_network(specification(32, classes)).train()
    num_steps = EPOCHS * (len(images) // BATCH_SIZE)
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=num_steps)
    pixels, targets = torch.from_numpy(images), torch.from_numpy(labels)
    for epoch in range(EPOCHS):
        order = torch.randperm(len(images))
        for step in range(len(images) // BATCH_SIZE):
            batch = order[step * BATCH_SIZE : (step + 1) * BATCH_SIZE]
            chosen = pixels[batch].flip(2) if torch.rand(()) < 0.5 else pixels[batch]
            loss = functional.cross_entropy(network(chosen), targets[batch], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch + 1}: loss {float(loss):.3f}", flush=True)
    return network.eval()


def enlarged(images: NDArray[np.uint8], size_px: int) -> NDArray[np.uint8]:
    """Enlarge images to (rows, size_px, size_px, 3)."""
    return np.stack(
        [
            np.asarray(Image.fromarray(image).resize((size_px, size_px), Image.Resampling.BILINEAR))
            for image in images
        ]
    )


def speed_line(size_px: int, timings: Timings) -> str:
    """Format one row of the table."""
    speeds = {name: timings.rows_per_second(name) for name in ("fp32", "int8")}
    best = {name: timings.best_batch_size(name) for name in speeds}
    cells = [
        f"{size_px} px",
        f"{best['fp32']}, {best['int8']}",
        *(f"{speeds[name][best[name]]:,.0f}" for name in speeds),
    ]
    cells += [
        times_text(timings.throughput("int8", "fp32", 0.95)),
        *(f"{timings.p50_ms(name):.2f}" for name in speeds),
    ]
    return f"| {' | '.join([*cells, times_text(timings.latency('int8', 'fp32', 0.95))])} |"


def answers(graph: bytes, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the probabilities (rows, classes)."""
    return run_in_batches(
        open_onnx(graph, variant="int8", precision="int8", provider="cpu", num_threads=0).run,
        rows,
        64,
    ).outputs


def exported(network: Network, rows: NDArray[np.uint8], classes: list[str]) -> bytes:
    """Export the fp32 graph for images of the size of `rows`, with the same weights."""
    size_px = rows.shape[1]
    grown = build_network(specification(size_px, classes)).eval()
    grown.load_state_dict(network.state_dict())
    output = OutputContract(kind="probabilities", labels=classes)
    return export_graph(
        calibrated(grown, rows[:64]), contract(size_px), output, opset=18, max_batch_size=256
    )


def timed(fp32: bytes, int8: bytes, rows: NDArray[np.uint8]) -> Timings:
    """Time both graphs in turns."""
    graphs = {"fp32": fp32, "int8": int8}
    runners = {
        name: open_onnx(graph, variant=name, precision=name, provider="cpu", num_threads=0)
        for name, graph in graphs.items()
    }
    return measure_in_turns(runners, rows, LARGEST_BATCH, LIMIT_S, 0.95)


def with_section(page: str, heading: str, body: str) -> str:
    """Return the page with this section replaced; sections of other machines stay."""
    title, *sections = page.rstrip("\n").split("\n\n## ")
    kept = {section.partition("\n\n")[0]: section.partition("\n\n")[2] for section in sections} | {
        heading: body
    }
    return (
        "\n\n".join(
            [title, *(f"## {name}\n\n{kept[name]}" for name in HEADINGS.values() if name in kept)]
        )
        + "\n"
    )


def main() -> None:
    """Measure accuracy at 32 px and speed at 32 and 224 px, and write the table."""
    images, labels, classes = read_rows("train.parquet", NUM_TRAIN)
    validation, indices, _ = read_rows("test.parquet", NUM_VALIDATION)
    network, budget = train(images, labels, classes), load_params().export.goal.max_metric_loss
    fp32, targets, resampling = (
        exported(network, images, classes),
        indices.astype(np.float64),
        Resampling(7, 1000, 0.95),
    )
    reference = answers(fp32, validation)

    def loss(graph: bytes) -> Metric:
        return metric_loss(
            "image_classification", targets, reference, answers(graph, validation), resampling
        )

    with tempfile.TemporaryDirectory() as scratch:
        rows = images[:NUM_CALIBRATION]
        int8, attempts = search(
            StaticQuantizer(fp32, rows, Path(scratch), CPU),
            fp32,
            rows,
            lambda graph: loss(graph).value,
            budget,
        )
    lines = [speed_line(32, timed(fp32, int8, images[:64]))]
    enlarged_rows = enlarged(images[:64], 224)
    large = exported(network, enlarged_rows, classes)
    with tempfile.TemporaryDirectory() as scratch:
        lines.append(
            speed_line(
                224,
                timed(
                    large,
                    StaticQuantizer(large, enlarged_rows, Path(scratch), CPU).graph(),
                    enlarged_rows,
                ),
            )
        )

    found, share = loss(int8), float((reference.argmax(axis=1) == indices).mean())
    notes = (
        f"fp32 is right on {share:.2%} of {len(targets):,} images that it never saw; int8 loses "
        f"{100 * found.value:.2f} points "
        f"({100 * found.low:.2f} to {100 * found.high:.2f}), at most {100 * budget:g} are "
        "allowed. Ways of quantising that were tried: "
        f"{len(attempts)}. {size(len(fp32))} become {size(len(int8))}."
    )
    note = (
        f"timm's resnet18, {EPOCHS} epochs on {NUM_TRAIN:,} images of 32 px; at 224 px the same "
        "weights. Medians of 11 rounds in which "
        f"both take turns, with 95 % bounds. int8 by {int8_instructions()}, with weights of "
        f"{weight_bits()} bits."
    )
    text = "\n".join([f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}", *lines])
    versions = conditions("torch", "timm", "onnxruntime-gpu", "onnx")
    files.write_text(
        RESULT,
        with_section(
            RESULT.read_text(), HEADINGS[weight_bits()], f"{text}\n\n{notes}\n\n{note}\n{versions}"
        ),
    )
    print(f"{text}\n{notes}")


if __name__ == "__main__":
    main()
