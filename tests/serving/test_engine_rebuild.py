"""The service starts without an engine of another machine, rebuilds it and loads it.

The GPU is simulated (tests/fake_tensorrt.py). Processes, files, certificates, loading and the swap
are real.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import pytest

from slipway.artifacts.bundle import LoadedBundle, load_bundle
from slipway.artifacts.certificate import Execution
from slipway.artifacts.engine_manifest import (
    EngineMachine,
    EngineManifest,
    EngineRequest,
    Profile,
    write_engine,
    write_skipped_build,
)
from slipway.inputs.images import array_from_bytes
from slipway.runtimes import compilation
from slipway.runtimes.rebuild import CERTIFICATE, main, open_rebuilt, rebuild_engine
from slipway.runtimes.tensorrt import build_engine
from slipway.serving.app import Application
from slipway.serving.engine_rebuild.extension import attach, first_state
from slipway.serving.extensions import EXTENSIONS
from slipway.serving.models.loader import load_model
from slipway.serving.models.model import ServedModel
from slipway.serving.requests.payload import Payload
from slipway.serving.settings import Settings
from slipway.serving.worker import ModelWorker
from slipway.system import files
from slipway.system.errors import IntegrityError, ParityError, UnavailableError
from tests import fake_tensorrt
from tests.serving.bundles import (
    CONTRACT,
    MACHINE,
    WEIGHTS,
    certify,
    classifier,
    hop,
    picture,
    probabilities,
    with_golden_rows,
    write_bundle,
)
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import behind, full_worker, put_in_place_of, rebuild_of
from tests.serving.server import ROOT

COMMAND = (sys.executable, "-m", "tests.fake_rebuild")
PNG = {"content-type": "image/png"}
REQUEST = EngineRequest(
    requested=Execution(backend="tensorrt", provider="tensorrt", precision="fp32", variant="fp32"),
    profile=Profile(smallest=1, optimal=4, largest=16),
    workspace_mib=64,
)


@pytest.fixture
def elsewhere(certified: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A certified bundle with golden rows, an engine from another GPU, and a simulated GPU here."""
    fake_tensorrt.pretend(monkeypatch.setattr)
    monkeypatch.setitem(sys.modules, "tensorrt", fake_tensorrt)
    bundle = with_golden_rows(write_bundle(certified / "bundle"))
    write_foreign_engine(certified / "engine", bundle)
    certify_both(certified, bundle)
    return certified


def write_foreign_engine(
    root: Path, bundle: LoadedBundle, machine: EngineMachine = MACHINE
) -> None:
    engine_manifest = EngineManifest(
        format_version=2,
        engine_sha256=files.sha256_bytes(b"plan"),
        model_sha256=bundle.manifest.models["fp32"].sha256,
        bundle_digest=bundle.digest,
        machine=machine,
        actual=REQUEST.requested,
        precision_read_from="engine",
        **dict(REQUEST),
    )
    write_engine(root, b"plan", engine_manifest)


def certify_both(root: Path, bundle: LoadedBundle) -> None:
    engine_hop = hop().model_copy(
        update={
            "name": "tensorrt/fp32",
            "requested": REQUEST.requested,
            "actual": REQUEST.requested,
        }
    )
    digest = files.sha256_file(root / "engine/engine_manifest.json")
    certify(root / "certificate.json", bundle, [hop(), engine_hop], engine_digest=digest)


def build_here(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the service call `rebuild_engine` in this process."""
    monkeypatch.setattr(
        compilation,
        "build_engine_apart",
        lambda module, request: build_engine(fake_tensorrt, request),
    )
    rebuild_engine(root / "bundle", root / "engine", root / "rebuilt")


@pytest.fixture
def settings(elsewhere: Path, make_settings: MakeSettings) -> Settings:
    return make_settings(rebuild_engine="true", rebuilt_engine=elsewhere / "rebuilt")


class Load:
    """Callers that send requests until they are stopped, and check every prediction."""

    def __init__(self, client: httpx.AsyncClient, num_callers: int = 2) -> None:
        self._client, self._going = client, True
        self.statuses: list[int] = []
        self.wrong = 0
        self._payloads = [picture(number) for number in range(8)]
        pixels = np.stack([array_from_bytes(payload, CONTRACT) for payload in self._payloads])
        self._expected = probabilities(pixels)
        self._callers = [asyncio.create_task(self._ask(number)) for number in range(num_callers)]

    async def _ask(self, number: int) -> None:
        while self._going:
            row = (number + len(self.statuses)) % len(self._payloads)
            response = await self._client.post("/predict", content=self._payloads[row], headers=PNG)
            self.statuses.append(response.status_code)
            found = list(response.json().get("probabilities", {}).values())
            self.wrong += not (
                len(found) == 3 and np.allclose(found, self._expected[row], atol=1e-5)
            )
            await asyncio.sleep(0.01)

    async def end(self) -> None:
        self._going = False
        await asyncio.gather(*self._callers)


def rebuilding_worker(settings: Settings, command: tuple[str, ...]) -> ModelWorker:
    """Return a worker whose engine is rebuilt by `command`."""
    extensions = [
        replace(one, attach=partial(attach, command=command)) if one.attach is attach else one
        for one in EXTENSIONS
    ]
    return ModelWorker(settings, extensions)


def serve_and_rebuild(
    settings: Settings, command: tuple[str, ...] = COMMAND
) -> tuple[dict[str, Any], dict[str, Any], Load]:
    """Return the model info before and after a rebuild, and the load during it."""

    async def main() -> tuple[dict[str, Any], dict[str, Any], Load]:
        worker = rebuilding_worker(settings, command)
        worker.start()
        await worker.loaded()
        await asyncio.sleep(0.01)  # the rebuild begins after the model is there
        transport = httpx.ASGITransport(Application(behind, worker), raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            before = (await client.get("/model")).json()
            load = Load(client)
            await rebuild_of(worker).ended()
            await asyncio.sleep(0.1)
            await load.end()
            after = (await client.get("/model")).json()
        await worker.stop()
        return before, after, load

    return asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.process
def test_rebuilt_engine_is_certified_and_replaces_the_model_under_load(
    elsewhere: Path, settings: Settings
) -> None:
    before, after, load = serve_and_rebuild(settings)
    assert before["execution"]["actual"]["provider"] == "cpu"
    assert (
        "the engine is for another machine. GPU: built with H200, here Pretended H200"
        in before["execution"]["passed_over"][0]
    )
    assert (before["rebuild"]["status"], before["target_certificate"]) == ("building", None)

    assert after["rebuild"]["status"] == "swapped"
    assert after["execution"]["actual"] == REQUEST.requested.model_dump()
    assert after["model_version"] == before["model_version"]
    target = after["target_certificate"]
    assert (
        target["machine"]["gpu"],
        target["golden_rows"]["rows"],
        target["golden_rows"]["flipped"],
    ) == (
        "Pretended H200",
        20,
        [],
    )
    assert target["engine_digest"] == files.sha256_file(elsewhere / "rebuilt/engine_manifest.json")

    assert len(load.statuses) > 50
    assert (set(load.statuses), load.wrong) == ({200}, 0)

    again = load_model(settings)  # the next start
    assert again.selection.actual.backend == "tensorrt"


def test_rebuilt_engine_is_not_served_if_its_variant_is_uncertified(
    elsewhere: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the certificate of the other machine, the unserved variant lost too much accuracy."""
    build_here(elsewhere, monkeypatch)
    bundle = load_bundle(elsewhere / "bundle")
    assert load_model(settings).selection.actual.backend == "tensorrt"

    lost = hop().model_copy(update={"status": "uncertified", "reason": "0.3 points lost"})
    digest = files.sha256_file(elsewhere / "engine/engine_manifest.json")
    cuda = hop().requested.model_copy(update={"provider": "cuda"})
    lost = lost.model_copy(update={"name": "lossy", "requested": cuda, "actual": cuda})
    certify(elsewhere / "certificate.json", bundle, [hop(), lost], engine_digest=digest)
    model = load_model(settings)
    assert model.selection.actual.provider == "cpu"
    assert "lossy is uncertified: 0.3 points lost" in model.selection.passed_over[0]
    state = first_state(settings, model)
    assert (state.status, "lossy is uncertified" in state.reason) == ("impossible", True)


@pytest.mark.process
@pytest.mark.parametrize(
    ("mood", "reason"),
    [
        ("crash", "the process that builds the engine was ended by SIGSEGV"),
        ("kill", "the rebuild was ended by SIGKILL"),
        ("wrong", "the golden rows were not answered as fp32 answers them"),
    ],
)
def test_failed_engine_build_leaves_the_served_model_and_reports_the_reason(
    elsewhere: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch, mood: str, reason: str
) -> None:
    monkeypatch.setenv("FAKE_TENSORRT", mood)
    before, after, load = serve_and_rebuild(settings)
    assert after["rebuild"]["status"] == "failed"
    assert reason in after["rebuild"]["reason"]
    assert after["execution"] == before["execution"]
    assert len(load.statuses) > 50
    assert (set(load.statuses), load.wrong) == ({200}, 0)
    assert not (elsewhere / "rebuilt").exists()


@pytest.mark.process
def test_the_end_of_the_service_ends_the_rebuild_and_all_of_its_processes(
    elsewhere: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_TENSORRT", "slow")

    async def main() -> None:
        worker = rebuilding_worker(settings, COMMAND)
        worker.start()
        await worker.loaded()
        while not rebuilding_processes(elsewhere):
            await asyncio.sleep(0.02)
        await worker.stop()

    asyncio.run(asyncio.wait_for(main(), 60))
    assert rebuilding_processes(elsewhere) == []
    assert not (elsewhere / "rebuilt").exists()


def rebuilding_processes(root: Path) -> list[int]:
    """Return the running processes whose command names this test's folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(root / "rebuilt").encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except OSError:  # it has ended
            continue
    return [process for process in found if process != os.getpid()]


def test_rebuilt_engine_is_served_from_the_next_start(
    elsewhere: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_model(settings).selection.actual.backend == "onnxruntime"
    build_here(elsewhere, monkeypatch)
    model = load_model(settings)
    assert model.selection.actual.backend == "tensorrt"
    assert model.selection.target_certificate is not None
    assert model.golden_rows is not None
    pixels = np.random.default_rng(0).integers(0, 256, (5, *CONTRACT.shape), dtype=np.uint8)
    assert np.allclose(model.run(pixels).outputs, probabilities(pixels), atol=1e-6)


def test_rebuild_reads_the_request_from_a_skipped_build_as_well(
    elsewhere: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (elsewhere / "engine").iterdir():
        path.unlink()
    write_skipped_build(elsewhere / "engine", REQUEST, "no NVIDIA driver")
    certify(elsewhere / "certificate.json", load_bundle(elsewhere / "bundle"))
    build_here(elsewhere, monkeypatch)
    assert load_model(settings).selection.actual == REQUEST.requested


def other_bundle(root: Path) -> None:
    bundle = with_golden_rows(
        write_bundle(root / "bundle", max_batch_size=16, versions={"onnx": "another"})
    )
    certify_both(root, bundle)


def other_gpu(root: Path) -> None:
    fake_tensorrt.GPU["gpu"] = "Another GPU"


@pytest.mark.parametrize(
    ("change", "reason"), [(other_bundle, "is of bundle"), (other_gpu, "here Another GPU")]
)
def test_rebuilt_engine_of_another_bundle_or_gpu_is_ignored(
    elsewhere: Path,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], None],
    reason: str,
) -> None:
    monkeypatch.setattr(fake_tensorrt, "GPU", dict(fake_tensorrt.GPU))
    build_here(elsewhere, monkeypatch)
    change(elsewhere)
    selection = load_model(settings).selection
    assert selection.actual.backend == "onnxruntime"
    assert reason in selection.passed_over[0]


@pytest.mark.parametrize("name", ["engine.plan", "engine_manifest.json", CERTIFICATE])
def test_flipped_bit_in_a_rebuilt_engine_makes_the_service_not_ready(
    elsewhere: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    build_here(elsewhere, monkeypatch)
    path = elsewhere / "rebuilt" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(IntegrityError):
        load_model(settings)
    with pytest.raises(IntegrityError):
        open_rebuilt(elsewhere / "rebuilt", load_bundle(elsewhere / "bundle"))


@pytest.mark.parametrize(
    ("mood", "reason"),
    [("wrong", "Worst row: row"), ("nan", "NaN or an infinity, the first is row15")],
)
def test_engine_that_differs_on_golden_rows_is_refused_and_the_old_one_stays(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, mood: str, reason: str
) -> None:
    build_here(elsewhere, monkeypatch)
    before = (elsewhere / "rebuilt" / CERTIFICATE).read_bytes()
    monkeypatch.setattr(
        fake_tensorrt, "GPU", fake_tensorrt.GPU | {"gpu": "Another GPU"}
    )  # so that it is built again
    monkeypatch.setenv("FAKE_TENSORRT", mood)
    with pytest.raises(ParityError, match=reason):
        build_here(elsewhere, monkeypatch)
    assert (elsewhere / "rebuilt" / CERTIFICATE).read_bytes() == before


def test_matching_engine_is_not_rebuilt_and_timings_are_reused(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_here(elsewhere, monkeypatch)
    timings = elsewhere / "rebuilt/timing.cache"
    assert timings.read_bytes() == b"|timed"
    build_here(elsewhere, monkeypatch)  # as another worker of the service does
    assert timings.read_bytes() == b"|timed"
    monkeypatch.setattr(fake_tensorrt, "GPU", fake_tensorrt.GPU | {"gpu": "Another GPU"})
    build_here(elsewhere, monkeypatch)
    assert timings.read_bytes() == b"|timed|timed"


def test_rebuild_is_refused_for_a_bundle_without_golden_rows(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bundle(elsewhere / "bundle")
    with pytest.raises(
        UnavailableError, match=r"no golden rows to certify an engine on. Set export\.golden_rows"
    ):
        build_here(elsewhere, monkeypatch)


def test_rebuild_without_a_gpu_is_reported_as_impossible(
    certified: Path, make_settings: MakeSettings
) -> None:
    bundle = with_golden_rows(write_bundle(certified / "bundle"))
    write_foreign_engine(certified / "engine", bundle)
    certify_both(certified, bundle)
    before, after, _ = serve_and_rebuild(
        make_settings(rebuild_engine="true", rebuilt_engine=certified / "rebuilt")
    )
    assert before["rebuild"]["status"] == after["rebuild"]["status"] == "impossible"
    assert "NVIDIA driver" in after["rebuild"]["reason"]


@pytest.mark.parametrize(
    ("variables", "status"),
    [({}, "not_requested"), ({"rebuild_engine": "true", "provider": "cpu"}, "not_needed")],
)
def test_no_engine_is_built_unless_requested(
    elsewhere: Path, make_settings: MakeSettings, variables: dict[str, str], status: str
) -> None:
    _, after, _ = serve_and_rebuild(
        make_settings(rebuilt_engine=elsewhere / "rebuilt", **variables)
    )
    assert after["rebuild"]["status"] == status
    assert not (elsewhere / "rebuilt").exists()


def test_rebuild_process_prints_its_error_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "nice", lambda by: 0)
    assert main([str(tmp_path), str(tmp_path), str(tmp_path / "rebuilt")]) == 1
    assert "is not a bundle" in capfd.readouterr().err


@pytest.mark.process
def test_the_container_compiles_without_params_or_data(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With only the files of a bento, `python -m slipway.stages.compile` ends without a GPU."""
    folder = elsewhere / "container"
    (folder / "slipway/stages").mkdir(parents=True)
    ring_0 = [
        f"slipway/{part}"
        for part in (
            "__init__.py",
            "artifacts",
            "config",
            "inputs",
            "kinds",
            "metrics",
            "runtimes",
            "system",
            "traffic",
        )
    ]
    for name in (*ring_0, "slipway/stages/__init__.py", "slipway/stages/compile.py"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "artifacts").mkdir()
    for name in ("bundle", "engine"):
        (folder / "artifacts" / name).symlink_to(elsewhere / name)
    blocked = ["ruamel", "ruamel.yaml", "yaml", "torch", "pyarrow", "dvc", "onnx"]
    script = (
        f"import runpy, sys; sys.modules.update(dict.fromkeys({blocked})); "
        "runpy.run_module('slipway.stages.compile', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "error: no engine can be built here" in done.stderr
    assert "Traceback" not in done.stderr


def test_model_promoted_while_the_engine_loads_continues_to_serve(
    elsewhere: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def build(settings: Settings, command: object) -> None:
        build_here(elsewhere, monkeypatch)

    async def main() -> None:
        worker = full_worker(settings)

        def load(settings: Settings) -> ServedModel:
            promoted_settings = {"bundle": elsewhere / "promoted"}
            worker.model_settings = settings.model_copy(update=promoted_settings)
            return load_model(settings)

        promoted = load_model(settings)
        await worker.swap(promoted)
        monkeypatch.setattr("slipway.serving.engine_rebuild.extension.build", build)
        monkeypatch.setattr("slipway.serving.engine_rebuild.extension.load_model", load)
        await rebuild_of(worker).rebuild()
        assert worker.model is promoted
        assert rebuild_of(worker).state.status == "failed"
        assert "another model was rolled out meanwhile" in rebuild_of(worker).state.reason
        await worker.stop()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_requests_in_flight_finish_on_the_previous_model_after_a_swap(
    certified: Path, make_settings: MakeSettings
) -> None:
    old = load_model(make_settings())
    bundle = write_bundle(certified / "bundle", versions={"onnx": "another"})
    certify(certified / "certificate.json", bundle)
    new = load_model(make_settings())
    assert old.version != new.version

    async def main() -> None:
        worker = full_worker(make_settings())
        await worker.swap(old)
        live = worker._live
        assert live
        slow = live.batcher._run

        def run_slowly(batch: Any) -> Any:
            time.sleep(0.3)
            return slow(batch)

        put_in_place_of(live, run_slowly)
        in_flight = [
            asyncio.create_task(
                worker.predict(Payload("images", (picture(number),)), f"request{number}")
            )
            for number in range(5)
        ]
        await asyncio.sleep(0.05)
        swapping = asyncio.create_task(worker.swap(new))
        await asyncio.sleep(0)
        assert (await worker.predict(Payload("images", (picture(),)), "new"))[
            "model_version"
        ] == new.version
        assert not swapping.done()  # it waits for those inside
        assert {answer["model_version"] for answer in await asyncio.gather(*in_flight)} == {
            old.version
        }
        await swapping
        assert live.batcher._thread._shutdown  # the old model's threads have ended
        await worker.stop()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_sixty_swaps_under_load_lose_no_request(
    certified: Path, make_settings: MakeSettings
) -> None:
    models = [load_model(make_settings())]
    certify(
        certified / "certificate.json",
        write_bundle(certified / "bundle", versions={"onnx": "another"}),
    )
    models.append(load_model(make_settings()))

    async def main() -> None:
        worker = full_worker(make_settings())
        await worker.swap(models[0])
        transport = httpx.ASGITransport(Application(behind, worker), raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            load = Load(client)
            for number in range(60):
                await worker.swap(models[(number + 1) % 2])
                await asyncio.sleep(0.01)
            await load.end()
        assert len(load.statuses) > 20
        assert (set(load.statuses), load.wrong) == ({200}, 0)
        await worker.stop()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_model_that_differs_on_its_golden_rows_is_not_served(
    certified: Path, make_settings: MakeSettings
) -> None:
    bundle = with_golden_rows(write_bundle(certified / "bundle"))
    certify(certified / "certificate.json", bundle)
    model = load_model(make_settings())
    assert model.golden_rows is not None
    assert model.info()["golden_rows"]["rows"] == 20
    graph = classifier()
    graph.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(-WEIGHTS, "weights"))
    other = with_golden_rows(write_bundle(certified / "bundle", graph))
    certify(certified / "certificate.json", other)
    with pytest.raises(ParityError, match="the golden rows were not answered as fp32 answers them"):
        load_model(make_settings())
