"""The exported page with WebGPU in a real Chromium, whose adapter may be SwiftShader on the CPU."""

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipway.artifacts.certificate import Hop
from slipway.export.targets.browser import hop
from slipway.export.targets.browser.export import write_browser
from slipway.export.targets.browser.hop import run_browser_hop
from slipway.export.targets.exported import ExportSource
from slipway.inputs.images import array_from_bytes
from slipway.system.errors import ParityError
from tests.export.targets.browser.runtimes import needs_browser, real_runtime
from tests.export.targets.sources import (
    image_source,
    photo,
    photos,
    table_source,
    text_source,
    trained_text_source,
)
from tests.serving.browser import Tab, browsing
from tests.serving.bundles import CONTRACT, LABELS, probabilities
from tests.tokens import token_contract

pytestmark = [pytest.mark.nightly(seconds=60), needs_browser]
# As a driver with a wrong function would compute: the shaders' exp becomes exp2.
WRONG_DRIVER = """
{
  const make = GPUDevice.prototype.createShaderModule;
  GPUDevice.prototype.createShaderModule = function (description) {
    const code = description.code.replaceAll("exp(", "exp2(");
    return make.call(this, { ...description, code });
  };
}
"""
COUNT_WORK = """
const submit = GPUQueue.prototype.submit;
globalThis.submitted = 0;
GPUQueue.prototype.submit = function (...given) {
  globalThis.submitted++;
  return submit.apply(this, given);
};
"""
READY = "document.getElementById('state').dataset.state === 'ready'"
ANSWERED = "document.querySelector('#answer .label')"


@pytest.mark.process
def test_webgpu_hop_names_its_adapter_and_agrees_on_every_row(tmp_path: Path) -> None:
    record = write_browser(tmp_path / "page", table_source(tmp_path), real_runtime(True))
    (webgpu,) = record.more_hops
    assert (webgpu.name, webgpu.status, webgpu.rows) == ("browser/webgpu", "agrees", 20)
    assert webgpu.flipped == []
    assert webgpu.max_difference is not None
    assert 0 < webgpu.max_difference <= 1e-5
    assert webgpu.latency_ms
    assert record.facts["webgpu"]["adapter"]
    assert record.certified


@pytest.mark.process
def test_export_is_refused_if_the_gpu_computes_wrongly(tmp_path: Path) -> None:
    def planted(folder: Path, source: ExportSource, has: bool) -> tuple[list[Hop], dict[str, Any]]:
        script = folder / "runtime.js"
        script.write_text(WRONG_DRIVER + script.read_text())
        return run_browser_hop(folder, source, has)

    source = image_source(tmp_path, photos())
    with pytest.raises(ParityError, match="hop browser/webgpu differs: the largest difference"):
        write_browser(tmp_path / "page", source, real_runtime(True), planted)
    assert not (tmp_path / "page").exists()


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: image_source(
            folder, [*photos(), photo(9, (64, 48), "JPEG"), photo(8, (50, 60), "JPEG")]
        ),
        text_source,
        lambda folder: trained_text_source(folder, "hashed_ngrams"),
        lambda folder: trained_text_source(folder, "small_transformer", token_contract()),
    ],
    ids=["images", "texts", "n-grams", "tokens"],
)
def test_webgpu_predicts_as_the_certified_graph_does(
    make: Callable[[Path], ExportSource], tmp_path: Path
) -> None:
    record = write_browser(tmp_path / "page", make(tmp_path), real_runtime(True))
    (webgpu,) = record.more_hops
    assert webgpu.status == "agrees"
    assert webgpu.rows == record.hop.rows
    assert webgpu.flipped == []


def test_webgpu_hop_in_a_browser_without_an_adapter_is_recorded_as_not_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hop, "_GPU", ("--disable-gpu",))
    record = write_browser(tmp_path / "page", table_source(tmp_path), real_runtime(True))
    assert record.certified
    assert [one.status for one in record.more_hops] == ["not_executed"]
    assert record.facts["webgpu"] == {"reason": "this browser has no WebGPU adapter"}
    runtime = asyncio.run(asked(tmp_path, hop_flags=("--enable-unsafe-webgpu",)))
    assert runtime == (
        "Answers by WebAssembly, because its hop was not run: this browser has no WebGPU adapter."
    )


async def asked(
    folder: Path, before: str = "", after: str = "", hop_flags: tuple[str, ...] = hop._GPU
) -> str:
    """Return what the page in `folder` says about its runtime, once it answered."""
    profile = Path(tempfile.mkdtemp(dir=folder))
    async with browsing(profile, *hop_flags) as tab:
        return await used(tab, folder, before, after)


async def used(tab: Tab, folder: Path, before: str, after: str) -> str:
    await tab.call("Page.addScriptToEvaluateOnNewDocument", source=before)
    await tab.open((folder / "page/index.html").as_uri())
    await tab.wait_for(READY)
    await tab.run(after)
    is_image = await tab.run("!document.getElementById('images').hidden")
    if is_image:
        picture = folder / "picture.png"
        picture.write_bytes(photo(5, (40, 30)))
        await tab.choose_files("#file", picture)
    else:
        await tab.run("document.getElementById('row').requestSubmit()")
    await tab.wait_for(ANSWERED)
    await tab.wait_for(READY)
    if is_image:
        pixels = array_from_bytes(picture.read_bytes(), CONTRACT)
        assert (
            await tab.text("#answer .label")
            == LABELS[int(probabilities(pixels[np.newaxis]).argmax())]
        )
    # Chromium's own warning.
    assert [one for one in tab.complaints if not one.startswith("No available adapters")] == []
    assert all(url.startswith(("file:", "blob:")) for url in tab.requested)
    return await tab.text("#runtime")


def test_page_says_which_runtime_answers_and_why(tmp_path: Path) -> None:
    write_browser(tmp_path / "page", image_source(tmp_path, photos()), real_runtime(True))

    def says(**given: Any) -> str:
        return asyncio.run(asyncio.wait_for(asked(tmp_path, **given), 120))

    by_webgpu = says(before=COUNT_WORK, after="if (!submitted) throw new Error('no work')")
    assert by_webgpu.startswith("Answers by WebGPU (")
    absent = "Answers by WebAssembly, because this browser has no WebGPU"
    assert says(hop_flags=("--disable-gpu",)) == f"{absent} adapter."
    assert says(before="Object.defineProperty(navigator, 'gpu', {})") == f"{absent}."
    wrong = says(before=WRONG_DRIVER)
    assert wrong.startswith(
        "Answers by WebAssembly, because WebGPU of this device differs from WebAssembly by "
    )
    lose = "ort.env.webgpu.device.destroy(); ort.env.webgpu.device.lost.then(() => 0)"
    lost = says(after=lose)
    assert lost.startswith("Answers by WebAssembly, because WebGPU was lost")
