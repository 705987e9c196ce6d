"""Tests of JPEG inputs: equal pixels for any index and process, and named damaged images."""

import multiprocessing
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from slipway.data.store.jpeg_inputs import JPEG, OFFSETS, JpegInputs, decode_jpeg, encode_jpeg
from slipway.system.errors import IntegrityError, SchemaError
from tests.data.pictures import pixels

NUM_ROWS, SHAPE = 50, (16, 16, 3)


def smooth(seed: int, channels: int = 3) -> NDArray[np.uint8]:
    """Return pixels (16, 16, channels) without sharp edges, which JPEG preserves well."""
    return np.kron(pixels(seed, 2, channels) // 8 + 100, np.ones((8, 8, 1), np.uint8))


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    jpegs = [encode_jpeg(smooth(seed), 95) for seed in range(NUM_ROWS)]
    (tmp_path / JPEG).write_bytes(b"".join(jpegs))
    np.save(tmp_path / OFFSETS, np.cumsum([0, *map(len, jpegs)], dtype=np.int64))
    return tmp_path


def test_jpeg_rows_can_be_indexed_by_number_slice_array_and_mask(folder: Path) -> None:
    inputs = JpegInputs(folder, SHAPE)
    everything = np.stack([inputs[number] for number in range(NUM_ROWS)])
    assert (inputs.shape, inputs.dtype, len(inputs)) == (
        (NUM_ROWS, *SHAPE),
        np.dtype(np.uint8),
        NUM_ROWS,
    )
    chosen = np.array([49, 3, 3, 17])
    mask = np.arange(NUM_ROWS) % 3 == 0
    for rows in (slice(None), slice(5, 40, 3), slice(7, 7), chosen, chosen.tolist(), mask):
        assert np.array_equal(inputs[rows], everything[rows])
    assert np.array_equal(inputs[-1], everything[-1])
    with pytest.raises(IndexError):
        inputs[NUM_ROWS]


def test_decoded_jpeg_pixels_are_close_to_the_encoded_pixels(folder: Path) -> None:
    expected = np.stack([smooth(seed) for seed in range(NUM_ROWS)]).astype(int)
    assert np.abs(JpegInputs(folder, SHAPE)[:] - expected).mean() < 2


@pytest.mark.parametrize("channels", [1, 3])
def test_higher_jpeg_quality_gives_pixels_closer_to_the_original(channels: int) -> None:
    image = pixels(1, 16, channels)
    errors = [
        np.abs(decode_jpeg(encode_jpeg(image, quality), image.shape).astype(int) - image).mean()
        for quality in (30, 75, 100)
    ]
    assert errors[0] > errors[1] > errors[2]


def _read_in_child(inputs: JpegInputs, connection: object) -> None:
    connection.send((inputs[:20], threading.active_count()))  # type: ignore[attr-defined]


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_loader_process_decodes_equal_pixels_on_a_single_thread(
    folder: Path, method: str
) -> None:
    inputs = JpegInputs(folder, SHAPE)
    expected = inputs[:20]  # starts this process's threads, which a fork does not have
    context = multiprocessing.get_context(method)
    mine, other = context.Pipe()
    child = context.Process(  # type: ignore[attr-defined]
        target=_read_in_child, args=(inputs, other)
    )
    child.start()
    assert mine.poll(60)
    found, num_threads = mine.recv()
    child.join()
    assert np.array_equal(found, expected)
    assert num_threads == 1


def test_a_forked_process_that_is_not_a_loader_has_its_own_threads(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = JpegInputs(folder, SHAPE)
    expected = inputs[:]
    before = inputs._pool()
    real = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: real + 1)
    assert inputs._pool() is not before
    assert np.array_equal(inputs[:], expected)


def test_error_names_the_number_of_a_damaged_image(folder: Path) -> None:
    begin, end = np.load(folder / OFFSETS)[7:9]
    payload = bytearray((folder / JPEG).read_bytes())
    payload[begin:end] = bytes(end - begin)
    (folder / JPEG).write_bytes(payload)
    inputs = JpegInputs(folder, SHAPE)
    assert inputs[6].shape == SHAPE
    with pytest.raises(IntegrityError, match=r"image 7 in .* is damaged"):
        inputs[:]


def test_jpeg_inputs_with_missing_files_or_wrong_offsets_are_refused(folder: Path) -> None:
    with pytest.raises(IntegrityError, match=r"\(16, 16, 3\) found, \(8, 8, 3\) expected"):
        JpegInputs(folder, (8, 8, 3))[0]
    (folder / JPEG).write_bytes((folder / JPEG).read_bytes()[:-1])
    with pytest.raises(SchemaError, match=r"offsets.npy does not fit inputs.jpeg"):
        JpegInputs(folder, SHAPE)
    (folder / OFFSETS).unlink()
    with pytest.raises(SchemaError, match="no readable JPEG images"):
        JpegInputs(folder, SHAPE)
