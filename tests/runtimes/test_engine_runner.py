import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from slipway.artifacts.engine_manifest import write_engine
from slipway.runtimes.engine_runner import EngineRunner, open_engine
from slipway.runtimes.runtime import why_unavailable
from slipway.system.errors import EngineError, UnavailableError
from tests.packed_tables import fit_contract
from tests.serving.bundles import CONTRACT, LABELS, engine_manifest_for, write_inert_bundle


class FakeDevice:
    """Fake GPU memory: a dict of arrays, in which queued work is done at once."""

    stream = 77

    def __init__(self) -> None:
        self.memory: dict[int, NDArray[np.uint8]] = {}
        self.freed: list[int] = []

    def allocate(self, num_bytes: int) -> int:
        address = 1000 * (len(self.memory) + 1)
        self.memory[address] = np.zeros(num_bytes, dtype=np.uint8)
        return address

    def free(self, addresses: list[int]) -> None:
        self.freed += addresses

    def upload(self, address: int, array: NDArray[Any]) -> None:
        self.memory[address][: array.nbytes] = array.reshape(-1).view(np.uint8)

    def download(self, address: int, array: NDArray[np.float32]) -> None:
        array[...] = self.memory[address][: array.nbytes].view(np.float32).reshape(array.shape)

    def wait(self) -> None:
        pass


class FakeContext:
    """A fake engine context that predicts the mean pixel of each row in the fake memory."""

    def __init__(self, device: FakeDevice, runs: bool = True) -> None:
        self.device, self.runs = device, runs
        self.addresses: dict[str, int] = {}
        self.shape: tuple[int, ...] = ()
        self.busy = threading.Lock()

    def set_tensor_address(self, name: str, address: int) -> None:
        self.addresses[name] = address

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert name == "image"
        self.shape = shape
        return True

    def execute_async_v3(self, stream: int) -> bool:
        assert stream == self.device.stream
        assert self.busy.acquire(blocking=False), "two threads at once"
        size = int(np.prod(self.shape))
        rows = self.device.memory[self.addresses["image"]][:size].reshape(self.shape[0], -1)
        answer = np.repeat(rows.mean(axis=1, dtype=np.float32)[:, None], len(LABELS), axis=1)
        self.device.upload(self.addresses["probabilities"], np.ascontiguousarray(answer))
        self.device.upload(self.addresses["ood_score"], rows.max(axis=1).astype(np.float32))
        self.busy.release()
        return self.runs


class FakeEngine:
    def __init__(self, context: FakeContext | None) -> None:
        self._context = context

    def create_execution_context(self) -> FakeContext | None:
        return self._context


def make_runner(tmp_path: Path, runs: bool = True) -> tuple[EngineRunner, FakeDevice]:
    bundle, device = write_inert_bundle(tmp_path), FakeDevice()
    return EngineRunner(
        FakeEngine(FakeContext(device, runs)), bundle, engine_manifest_for(bundle, b"plan"), device
    ), device


def pictures(num_rows: int) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (num_rows, *CONTRACT.shape), dtype=np.uint8)


@pytest.mark.parametrize("num_rows", [1, 3, 8])
def test_engine_runs_every_batch_size_of_its_profile(tmp_path: Path, num_rows: int) -> None:
    runner, _ = make_runner(tmp_path)
    batch = pictures(num_rows)
    outputs, scores = runner.run(batch)
    assert outputs.shape == (num_rows, len(LABELS))
    assert np.allclose(outputs[:, 0], batch.reshape(num_rows, -1).mean(axis=1))
    assert scores.tolist() == batch.reshape(num_rows, -1).max(axis=1).tolist()


@pytest.mark.parametrize("num_rows", [0, 9])
def test_an_engine_refuses_batches_outside_its_profile(tmp_path: Path, num_rows: int) -> None:
    with pytest.raises(ValueError, match=f"the batch has {num_rows} rows, expected 1 to 8"):
        make_runner(tmp_path)[0].run(pictures(num_rows))


def test_engine_refuses_a_batch_of_another_dtype(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the batch is float32, expected uint8"):
        make_runner(tmp_path)[0].run(pictures(2).astype(np.float32))


def test_engine_for_a_table_allocates_four_bytes_per_number(tmp_path: Path) -> None:
    contract = fit_contract({"size": [1.0, 2.0], "place": ["a", "b"]})
    bundle, device = write_inert_bundle(tmp_path, contract=contract), FakeDevice()
    EngineRunner(
        FakeEngine(FakeContext(device)), bundle, engine_manifest_for(bundle, b"plan"), device
    )
    assert [len(memory) for memory in device.memory.values()] == [
        8 * 2 * 4,
        8 * len(LABELS) * 4,
        8 * 4,
    ]


def test_engine_accepts_a_batch_that_is_not_contiguous(tmp_path: Path) -> None:
    batch = pictures(8)[::2]
    assert np.allclose(
        make_runner(tmp_path)[0].run(batch).outputs[:, 0], batch.reshape(4, -1).mean(axis=1)
    )


def test_threads_share_an_engine_in_turn_and_get_their_own_predictions(tmp_path: Path) -> None:
    runner, _ = make_runner(tmp_path)
    batches = [np.full((2, *CONTRACT.shape), value, dtype=np.uint8) for value in range(16)]
    answers: dict[int, NDArray[np.float32]] = {}

    def ask(value: int) -> None:
        for _ in range(20):
            answers[value] = runner.run(batches[value]).outputs

    threads = [threading.Thread(target=ask, args=(value,)) for value in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [float(answers[value][0, 0]) for value in range(16)] == list(range(16))


def test_failed_engine_execution_raises_an_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="did not run a batch"):
        make_runner(tmp_path, runs=False)[0].run(pictures(2))


def test_an_engine_without_an_execution_context_is_refused(tmp_path: Path) -> None:
    bundle = write_inert_bundle(tmp_path)
    with pytest.raises(EngineError, match="GPU memory is too small"):
        EngineRunner(FakeEngine(None), bundle, engine_manifest_for(bundle, b"plan"), FakeDevice())


def test_a_deleted_runner_frees_its_device_memory(tmp_path: Path) -> None:
    runner, device = make_runner(tmp_path)
    del runner
    assert sorted(device.freed) == sorted(device.memory)


@pytest.mark.skipif(why_unavailable("tensorrt") is None, reason="there is a GPU with TensorRT")
def test_without_a_gpu_an_engine_is_refused_and_never_replaced(tmp_path: Path) -> None:
    bundle = write_inert_bundle(tmp_path / "bundle")
    write_engine(tmp_path / "engine", b"plan", engine_manifest_for(bundle, b"plan"))
    with pytest.raises(UnavailableError, match="'tensorrt' was requested and cannot run here"):
        open_engine(tmp_path / "engine", bundle)
