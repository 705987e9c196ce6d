"""The first row of `bench.ladder`: plain torchvision training without a framework or preparation.

`python -m bench.ladder_naive FOLDER BATCH_SIZE NUM_WORKERS DATA_SET` runs a round of steps for
each line that it reads, and prints its rows per second. FOLDER has those of all data sets.
"""

import math
import sys
import time
from collections.abc import Iterator

import torch
from PIL import Image, ImageOps
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision import transforms  # type: ignore[import-untyped]
from torchvision.datasets import ImageFolder  # type: ignore[import-untyped]

from bench.ladder_data import DATA_SETS, NUM_CLASSES, SIZE_PX, cut_out, denoise
from slipway.config.network_arguments import SmallResnetArguments
from slipway.training.networks.image_networks import SmallResnet
from tests.project_params import PROJECT

FEWEST_BATCHES, MIN_SECONDS = 3, 1.0


def loader(
    folder: str, batch_size: int, num_workers: int, data_set: str
) -> DataLoader[tuple[torch.Tensor, torch.Tensor]]:
    """Make a loader whose workers read, decode, transform and resize every image in each epoch."""
    crops = [
        transforms.Resize((SIZE_PX, SIZE_PX)),
        transforms.RandomCrop(SIZE_PX, padding=4, padding_mode="edge"),
        transforms.RandomHorizontalFlip(),
    ]
    steps = {
        "plain": crops,
        "denoised": [transforms.Lambda(denoise), *crops],
        "video": [
            transforms.Lambda(_cut_out),
            transforms.RandomAffine(10, (0.05, 0.05), (0.9, 1.1)),
        ],
    }[data_set]
    steps += [transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.25] * 3)]
    images = f"{folder}/{DATA_SETS[data_set].folder}/train"
    dataset = ImageFolder(images, transforms.Compose(steps))
    return DataLoader(
        dataset,
        batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )


def _cut_out(frame: Image.Image) -> Image.Image:
    return ImageOps.pad(cut_out(frame)[0], (SIZE_PX, SIZE_PX))


def steps(batches: DataLoader[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[int]:
    """Yield the rows of each step in fp32, with network, optimizer and clipping of params.yaml."""
    torch.manual_seed(PROJECT.seed)
    network = SmallResnet(
        SmallResnetArguments.model_validate(PROJECT.train.network_arguments), 3, NUM_CLASSES
    )
    optimizer = torch.optim.AdamW(
        network.parameters(),
        lr=PROJECT.train.learning_rate,
        weight_decay=PROJECT.train.weight_decay,
    )
    while True:
        for images, targets in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(
                network(images), targets, label_smoothing=PROJECT.train.label_smoothing
            )
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(
                network.parameters(), PROJECT.train.gradient_clip_norm or math.inf
            )
            optimizer.step()
            yield len(images)


def main() -> None:
    """Run a round for each line on stdin."""
    folder, data_set = sys.argv[1], sys.argv[4]
    batch_size, num_workers = int(sys.argv[2]), int(sys.argv[3])
    training = steps(loader(folder, batch_size, num_workers, data_set))
    next(training)
    print("ready", flush=True)
    for _ in sys.stdin:
        for _ in range(
            2 * num_workers + 1
        ):  # without batches that were prepared during another's turn
            next(training)
        begin, rows, count = time.perf_counter(), 0, 0
        while count < FEWEST_BATCHES or time.perf_counter() - begin < MIN_SECONDS:
            rows += next(training)
            count += 1
        print(f"rate {rows / (time.perf_counter() - begin)}", flush=True)


if __name__ == "__main__":
    main()
