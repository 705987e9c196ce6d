"""Runs the code of docs/how-to/video.md on frames of videos: once per frame, even after a kill."""

import importlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from PIL import Image

from slipway.data.augmentation.plan import open_augmented
from slipway.data.store.packed import open_split, read_manifest
from slipway.training.batches.batches import ImageChanges, TrainingBatches, cut_step
from tests import warm_starts
from tests.conftest import ROOT
from tests.data.test_data_stages import environment, finished_rows, prepare, run
from tests.user_functions import WriteFunctions, _write_functions  # noqa: F401 - a fixture

PAGE = ROOT / "docs/how-to/video.md"
SHAPES = {"square": 4, "triangle": 3}  # corners
SIDE, NUM_VIDEOS, NUM_FRAMES = 96, 16, 15
# Added to the page's function: slow, and with a line for each call.
SLOW = """
_crop = crop
def crop(image):
    import time
    with open("calls.txt", "a") as calls:
        calls.write("x")
    time.sleep(0.6)
    return _crop(image)
"""
CHANGES: dict[str, Any] = {
    "data__image_column": "image",
    "data__target_column": "label",
    "data__group_column": "video",
    "split__assignment": "exact",
    "precompute__transform": "transforms.parts:crop",
    "precompute__resize_mode": "pad",
    "precompute__image_size_px": 24,
    "precompute__channels": 3,
    "precompute__num_workers": 2,
    "augment__crop_padding_px": 0,
    "augment__translation": 0.05,
    "augment__forbid": [],
    "train__batch_size": 8,
    "train__epochs": 3,
    "evaluate__slices": ["found", "corners"],
}


def code(name: str) -> str:
    """Return the code block of the page that begins with the name of this file."""
    block = re.search(rf"^( *)```python\n *# {name}\n(.*?)^ *```", PAGE.read_text(), re.S | re.M)
    assert block is not None
    return "".join(
        line.removeprefix(block[1]) or line for line in block[2].splitlines(keepends=True)
    )


def frame(shape: str, generator: np.random.Generator) -> np.ndarray[Any, Any]:
    """Return a bright shape at a random place of a dark frame with noise."""
    pixels = generator.integers(0, 50, (SIDE, SIDE, 3), dtype=np.uint8)
    centre, radius = generator.integers(32, SIDE - 32, 2), generator.integers(16, 24)
    angles = generator.uniform(0, 2 * np.pi) + 2 * np.pi * np.arange(SHAPES[shape]) / SHAPES[shape]
    corners = centre + radius * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    bright = tuple(map(float, generator.integers(180, 256, 3)))
    cv2.fillConvexPoly(pixels, corners.round().astype(np.int32), bright)
    return pixels


def write_videos(folder: Path) -> None:
    generator = np.random.default_rng(0)
    for number in range(NUM_VIDEOS):
        shape = list(SHAPES)[number % 2]
        (folder / shape).mkdir(parents=True, exist_ok=True)
        path = folder / shape / f"video{number:02}.avi"
        writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 10.0, (SIDE, SIDE))
        assert writer.isOpened()
        for _ in range(NUM_FRAMES):
            writer.write(frame(shape, generator))
        writer.release()


@pytest.fixture(name="crop")
def _crop(
    write_functions: WriteFunctions,
) -> Callable[[Image.Image], tuple[Image.Image, dict[str, Any]]]:
    write_functions("belt", {"__init__.py": "", "parts.py": code("transforms/parts.py")})
    function: Callable[[Image.Image], tuple[Image.Image, dict[str, Any]]]
    function = importlib.import_module("belt.parts").crop
    return function


@pytest.mark.parametrize("shape", SHAPES)
def test_the_object_in_a_video_frame_is_cropped_with_a_margin_of_30_percent(
    crop: Callable[[Image.Image], tuple[Image.Image, dict[str, Any]]], shape: str
) -> None:
    made, values = crop(Image.fromarray(frame(shape, np.random.default_rng(1))))
    assert values["found"] is True
    assert values["corners"] == SHAPES[shape]
    bright = np.asarray(made).max(axis=2)
    rows, columns = np.nonzero(bright > 100)
    size = max(np.ptp(rows), np.ptp(columns)) + 1
    margins = rows.min(), columns.min(), *(np.array(bright.shape) - 1 - (rows.max(), columns.max()))
    assert all(abs(margin - 0.3 * size) <= 4 for margin in margins)
    assert bright[0].max() == bright[:, 0].max() == 0


def test_a_video_frame_without_an_object_stays_whole_and_is_marked(
    crop: Callable[[Image.Image], tuple[Image.Image, dict[str, Any]]],
) -> None:
    empty = Image.new("RGB", (SIDE, SIDE))
    assert crop(empty) == (empty, {"found": False, "corners": 0, "hull": 0.0})


def calls(folder: Path) -> int:
    path = folder / "calls.txt"
    return path.stat().st_size if path.exists() else 0


@pytest.mark.nightly(seconds=120)
def test_each_video_frame_is_cropped_once_although_precompute_was_killed(tmp_path: Path) -> None:
    write_videos(tmp_path / "videos")
    (tmp_path / "frames.py").write_text(code("frames.py"))
    subprocess.run([sys.executable, "frames.py"], cwd=tmp_path, check=True)
    num_frames = pyarrow.csv.read_csv(tmp_path / "data/frames/frames.csv").num_rows
    assert num_frames == NUM_VIDEOS * NUM_FRAMES // 5
    (tmp_path / "transforms").mkdir()
    (tmp_path / "transforms/__init__.py").touch()
    (tmp_path / "transforms/parts.py").write_text(code("transforms/parts.py") + SLOW)
    prepare(tmp_path, tmp_path / "data/frames", **CHANGES)
    text = (tmp_path / "params.yaml").read_text()
    (tmp_path / "params.yaml").write_text(
        text.replace("near_duplicate: flag", "near_duplicate: null")
    )
    run(tmp_path, "clean", "split")
    with warm_starts.start(["slipway.stages.precompute"], tmp_path, environment()) as process:
        while process.poll() is None and not finished_rows(tmp_path):
            time.sleep(0.01)
        process.kill()
    done = len(finished_rows(tmp_path))
    assert process.returncode == -signal.SIGKILL
    assert 0 < done < num_frames
    before = calls(tmp_path)
    run(tmp_path, "precompute")
    assert calls(tmp_path) - before == num_frames - done

    run(tmp_path, "augment", "train")
    assert calls(tmp_path) - before == num_frames - done, "training calls it for no frame"
    packed = tmp_path / "data/packed"
    manifest = read_manifest(packed)
    rows = pq.read_table(tmp_path / "data/split/rows.parquet").to_pylist()
    videos = {row["group"]: row["split"] for row in rows}
    assert len(videos) == NUM_VIDEOS
    assert all(row["split"] == videos[row["group"]] for row in rows)

    train = open_split(packed, manifest, "train")
    found = pq.read_table(packed / "train/transform.parquet").to_pylist()
    assert all(row["found"] for row in found)
    plan, _ = open_augmented(tmp_path / "data/augmented", manifest)
    batches = TrainingBatches(
        [train], cut_step(8, 1, 8), 0, 7, ImageChanges(plan, 24, False), target_dtype="int64"
    )
    for index in range(len(batches)):
        border = batches[0, index].inputs.numpy().copy()
        border[:, 1:-1, 1:-1] = 0
        assert border.max() < 60, "augmentation cuts no object"
