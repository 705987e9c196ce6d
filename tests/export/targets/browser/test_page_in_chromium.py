"""The exported page in a real Chromium: its hop, planted faults, and use from the disk."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from slipway.artifacts.bundle import CARD
from slipway.artifacts.certificate import Hop, read_certificate
from slipway.export.targets.browser import hop
from slipway.export.targets.browser.export import write_browser, write_page
from slipway.export.targets.browser.hop import run_browser_hop
from slipway.export.targets.exported import ExportSource
from slipway.inputs.images import array_from_bytes
from slipway.inputs.texts import TextContract, encode_texts, read_text
from slipway.system.errors import ParityError
from slipway.system.files import sha256_bytes
from tests.encoder_folders import word_piece
from tests.export.targets.browser.runtimes import needs_browser, real_runtime
from tests.export.targets.sources import (
    HOSTILE,
    image_source,
    photo,
    photos,
    planted_operator,
    roberta,
    table_source,
    text_source,
    trained_text_source,
)
from tests.serving.browser import Tab, browsing
from tests.serving.bundles import (
    CONTRACT,
    LABELS,
    TEXTS,
    probabilities,
)
from tests.tokens import token_contract

pytestmark = [pytest.mark.nightly(seconds=60), needs_browser]
CAMERA = "--use-fake-device-for-media-stream"
ACCEPTED = "--use-fake-ui-for-media-stream"
FLATTEN = "const image = await decode(bytes, contract);"
BY_CANVAS = """
    const image = await (async () => {
      const bitmap = await createImageBitmap(new Blob([bytes]));
      const canvas = document.createElement("canvas");
      [canvas.width, canvas.height] = SIZE;
      const context = canvas.getContext("2d", OPTIONS);
      context.drawImage(bitmap, 0, 0, ...SIZE);
      const rgba = context.getImageData(0, 0, ...SIZE).data;
      return { width: canvas.width, height: canvas.height, rgba };
    })();
"""


def by_canvas(size: str, options: str) -> tuple[str, str]:
    return FLATTEN, BY_CANVAS.replace("SIZE", size).replace("OPTIONS", options)


FAULTS = {
    "canvas resize": by_canvas("[contract.size_px, contract.size_px]", "{}"),
    "swapped channels": ("pixels[3 * pixel] = red;", "pixels[3 * pixel] = blue;"),
    # Without alpha, a canvas keeps the colours times their alpha.
    "premultiplied alpha": by_canvas("[bitmap.width, bitmap.height]", "{ alpha: false }"),
}


@pytest.mark.process
@pytest.mark.parametrize("fault", FAULTS)
def test_browser_hop_differs_if_preprocessing_has_a_planted_fault(
    fault: str, tmp_path: Path
) -> None:
    before, after = FAULTS[fault]

    def planted(folder: Path, source: ExportSource, _: bool) -> tuple[list[Hop], dict[str, Any]]:
        script = folder / "images.js"
        assert before in script.read_text()
        script.write_text(script.read_text().replace(before, after))
        return run_browser_hop(folder, source)

    source, out = image_source(tmp_path, photos()), tmp_path / "page"
    with pytest.raises(ParityError, match="hop browser differs: preprocessing") as refusal:
        write_browser(out, source, real_runtime(), planted)
    assert "rows became other inputs" in str(refusal.value)
    assert not out.exists()


def test_page_predicts_images_as_the_certified_graph_does_and_measures_jpeg(tmp_path: Path) -> None:
    jpegs = [photo(90 + row, (64 + row, 48), "JPEG") for row in range(8)]
    source = image_source(tmp_path, [*photos(), *jpegs])
    record = write_browser(tmp_path / "page", source, real_runtime())
    assert record.certified
    assert record.hop.rows == 20
    assert record.hop.flipped == []
    assert record.hop.max_difference is not None
    assert record.hop.max_difference <= 1e-5
    assert record.facts["jpeg"]["rows"] == 8
    assert record.facts["jpeg"]["max_levels"] <= 3
    certificate = read_certificate(tmp_path / "page/certificate.json")
    assert certificate.hops[-1] == record.hop
    assert certificate.bundle_digest == source.bundle.digest


@pytest.mark.process
def test_page_predicts_table_rows_as_the_certified_graph_does(tmp_path: Path) -> None:
    record = write_browser(tmp_path / "page", table_source(tmp_path), real_runtime())
    assert record.certified
    assert record.facts["rows_with_equal_inputs"] == 20


@pytest.mark.parametrize(
    ("name", "contract"),
    [
        ("hashed_ngrams", TEXTS),
        ("hashed_ngrams", TEXTS.model_copy(update={"masked": ["email", "phone", "card"]})),
        ("hashed_ngrams", TEXTS.model_copy(update={"columns": ["a", "b"], "masked": ["phone"]})),
        ("small_transformer", token_contract()),
        (
            "small_transformer",
            token_contract(
                tokenizer=word_piece(), columns=["a", "b"], is_pair=True, masked=["email"]
            ),
        ),
        (
            "small_transformer",
            token_contract(tokenizer=roberta(), columns=["a", "b"], is_pair=True),
        ),
    ],
    ids=["bytes", "masked", "two columns", "tokens", "masked pairs of BERT", "pairs of RoBERTa"],
)
def test_page_predicts_hostile_texts_as_the_certified_graph_does(
    name: str, contract: TextContract, tmp_path: Path
) -> None:
    source = trained_text_source(tmp_path, name, contract)
    record = write_browser(tmp_path / "page", source, real_runtime())
    assert record.certified
    assert record.facts["rows_with_equal_inputs"] == record.hop.rows >= len(HOSTILE)
    assert record.hop.flipped == []
    assert record.hop.max_difference is not None
    assert record.hop.max_difference <= 1e-5


@pytest.mark.parametrize(
    ("before", "after"),
    [('normalize("NFC")', 'normalize("NFKC")'), ('replace(SPACE, " ")', 'replace(/\\s+/g, " ")')],
    ids=["another normal form", "JavaScript's white space"],
)
def test_browser_hop_differs_if_texts_are_normalized_wrongly(
    before: str, after: str, tmp_path: Path
) -> None:
    def planted(folder: Path, source: ExportSource, _: bool) -> tuple[list[Hop], dict[str, Any]]:
        script = folder / "texts.js"
        assert before in script.read_text()
        script.write_text(script.read_text().replace(before, after))
        return run_browser_hop(folder, source)

    with pytest.raises(ParityError, match="hop browser differs: preprocessing"):
        write_browser(tmp_path / "page", text_source(tmp_path), real_runtime(), planted)


@pytest.mark.parametrize("is_table", [False, True])
def test_page_predicts_from_the_disk_without_any_connection(is_table: bool, tmp_path: Path) -> None:
    source = table_source(tmp_path) if is_table else image_source(tmp_path, photos())
    write_browser(tmp_path / "page", source, real_runtime())
    picture = tmp_path / "picture.png"
    picture.write_bytes(photo(5, (40, 30)))

    async def use(tab: Tab) -> str:
        await tab.open((tmp_path / "page/index.html").as_uri())
        await tab.wait_for("document.getElementById('state').dataset.state === 'ready'")
        if is_table:
            await tab.run("document.getElementById('row').requestSubmit()")
        else:
            await tab.choose_files("#file", picture)
        await tab.wait_for("document.querySelector('#answer .label')")
        assert await tab.run("document.querySelectorAll('#hops tr').length") == 2
        assert "Certified" in await tab.run("document.getElementById('verdict').textContent")
        blocked = "fetch('https://example.invalid/').then(() => 'sent', () => 'blocked')"
        label = await tab.text("#answer .label")
        assert tab.complaints == []
        assert all(url.startswith(("file:", "blob:file:", "blob:null")) for url in tab.requested)
        assert await tab.run(blocked) == "blocked"
        return label

    async def main() -> str:
        async with browsing(tmp_path / "profile") as tab:
            return await use(tab)

    label = asyncio.run(asyncio.wait_for(main(), 120))
    if not is_table:
        pixels = array_from_bytes(picture.read_bytes(), CONTRACT)
        assert label == LABELS[int(probabilities(pixels[np.newaxis]).argmax())]
    assert label in LABELS


def test_the_page_names_a_file_that_it_cannot_read(tmp_path: Path) -> None:
    write_browser(tmp_path / "page", image_source(tmp_path, photos()), real_runtime())
    picture = tmp_path / "picture.webp"
    Image.new("RGB", (9, 9)).save(picture)

    async def main() -> str:
        async with browsing(tmp_path / "profile") as tab:
            await tab.open((tmp_path / "page/index.html").as_uri())
            await tab.wait_for("document.getElementById('state').dataset.state === 'ready'")
            await tab.choose_files("#file", picture)
            await tab.wait_for("document.getElementById('state').dataset.state === 'failed'")
            return await tab.text("#state")

    said = asyncio.run(asyncio.wait_for(main(), 120))
    assert said == "the file is neither PNG nor JPEG; expected one of these. Convert it to PNG."


@pytest.mark.nightly(seconds=10)
def test_page_answers_a_dropped_file_and_shows_the_model_card_as_text(tmp_path: Path) -> None:
    card = "# Digits\n\n<img src=x onerror=document.title='ran'> 97 % of the test rows are right.\n"
    content = {"card_sha256": sha256_bytes(card.encode())}
    source = image_source(tmp_path, photos(), **content)
    (source.bundle.root / CARD).write_text(card)
    write_browser(tmp_path / "page", source, real_runtime())
    picture = tmp_path / "dropped.png"
    picture.write_bytes(photo(5, (40, 30)))

    async def main() -> str:
        async with browsing(tmp_path / "profile") as tab:
            await tab.open((tmp_path / "page/index.html").as_uri())
            await tab.wait_for("document.getElementById('state').dataset.state === 'ready'")
            await tab.drop_file("#drop", picture)
            await tab.wait_for("document.querySelector('#answer .label')")
            assert await tab.run("document.getElementById('preview').naturalWidth") == 40
            assert await tab.text("#card") == "", "the card is folded"
            await tab.run("document.getElementById('card').parentElement.open = true")
            assert await tab.run("document.getElementById('card').textContent") == card
            assert "97 % of the test rows are right." in await tab.text("#card")
            assert (await tab.run("document.title")).startswith("Model ")
            assert tab.complaints == []
            return await tab.text("#answer .label")

    pixels = array_from_bytes(picture.read_bytes(), CONTRACT)
    expected = LABELS[int(probabilities(pixels[np.newaxis]).argmax())]
    assert asyncio.run(asyncio.wait_for(main(), 120)) == expected


@pytest.mark.nightly(seconds=10)
def test_page_answers_a_submitted_text_and_refuses_an_empty_one(tmp_path: Path) -> None:
    source = text_source(tmp_path)
    write_browser(tmp_path / "page", source, real_runtime())
    texts = ["late again, and the parcel was open", "z" * 64, "caf\u00e9 \u6f22\u5b57 \U0001f600"]

    async def main() -> list[str]:
        async with browsing(tmp_path / "profile") as tab:
            await tab.open((tmp_path / "page/index.html").as_uri())
            await tab.wait_for("document.getElementById('state').dataset.state === 'ready'")

            async def submit(text: str, state: str) -> None:
                value = f"document.querySelector('#cells textarea').value = {json.dumps(text)}"
                await tab.run(f"{value}; document.getElementById('state').dataset.state = ''")
                await tab.run("document.querySelector('#row button').click()")
                await tab.wait_for(f"document.getElementById('state').dataset.state === '{state}'")

            labels = []
            for text in texts:
                await submit(text, "ready")
                labels.append(await tab.text("#answer .label"))
            await submit("  ", "failed")
            assert "; expected " in await tab.text("#state")
            assert await tab.run("document.getElementById('answer').hidden")
            assert tab.complaints == []
            return labels

    inputs = encode_texts([read_text({"text": text}, TEXTS) for text in texts], TEXTS)
    expected = [LABELS[best] for best in source.reference(inputs).outputs.argmax(axis=1)]
    assert len(set(expected)) > 1, expected
    assert asyncio.run(asyncio.wait_for(main(), 120)) == expected


def write_image_page(folder: Path) -> None:
    """Write the page of an image classifier to `folder`/page, without its hop."""
    (folder / "page").mkdir()
    write_page(folder / "page", image_source(folder, photos()), real_runtime())


def y4m(level: int) -> bytes:
    """Return a film of grey frames of 64 x 48 pixels with luminance `level` (16 to 235).

    https://wiki.multimedia.cx/index.php/YUV4MPEG2 describes the format.
    """
    frame = b"FRAME\n" + bytes([level]) * (64 * 48) + bytes([128]) * (2 * 32 * 24)
    return b"YUV4MPEG2 W64 H48 F30:1 Ip A1:1 C420jpeg\n" + 5 * frame


@pytest.mark.nightly(seconds=15)
def test_page_answers_frames_of_a_camera(tmp_path: Path) -> None:
    """A dark and a bright film get the labels that the graph gives such images."""
    write_image_page(tmp_path)

    async def label(level: int) -> str:
        film = tmp_path / f"{level}.y4m"
        film.write_bytes(y4m(level))
        flags = (CAMERA, f"--use-file-for-fake-video-capture={film}", ACCEPTED)
        async with browsing(tmp_path / str(level), *flags) as tab:
            await tab.open((tmp_path / "page/index.html").as_uri())
            await tab.wait_for("document.getElementById('state').dataset.state === 'ready'")
            await tab.run("document.getElementById('camera').click()")
            await tab.wait_for("!document.getElementById('camera-box').hidden")
            assert await tab.run("document.getElementById('video').videoWidth") == 64
            await tab.run("document.getElementById('snap').click()")
            await tab.wait_for("document.querySelector('#answer .label')")
            assert all("certificate.js" in one for one in tab.complaints), tab.complaints
            return await tab.text("#answer .label")

    async def main() -> list[str]:
        return [await label(level) for level in (16, 235)]

    ends = np.array([0, 255], np.uint8)[:, np.newaxis, np.newaxis, np.newaxis]
    pixels = np.broadcast_to(ends, (2, CONTRACT.size_px, CONTRACT.size_px, 3))
    expected = [LABELS[best] for best in probabilities(pixels).argmax(axis=1)]
    assert len(set(expected)) == 2
    assert asyncio.run(asyncio.wait_for(main(), 120)) == expected


@pytest.mark.nightly(seconds=15)
@pytest.mark.parametrize(
    ("flags", "before", "reason"),
    [
        ((CAMERA, f"{ACCEPTED}=deny"), "", "Permission denied"),
        ((f"{CAMERA}=device-count=0", ACCEPTED), "", "device not found"),
        # As on a page over HTTP from another machine.
        (
            (CAMERA, ACCEPTED),
            "Object.defineProperty(navigator, 'mediaDevices', { value: undefined })",
            "only pages over HTTPS",
        ),
    ],
    ids=["refused", "absent", "insecure"],
)
def test_page_says_why_it_has_no_camera_and_still_answers_files(
    flags: tuple[str, ...], before: str, reason: str, tmp_path: Path
) -> None:
    write_image_page(tmp_path)
    picture = tmp_path / "picture.png"
    picture.write_bytes(photo(5, (40, 30)))

    async def main() -> str:
        async with browsing(tmp_path / "profile", *flags) as tab:
            await tab.open((tmp_path / "page/index.html").as_uri())
            await tab.wait_for("document.getElementById('state').dataset.state === 'ready'")
            await tab.run(before)
            await tab.run("document.getElementById('camera').click()")
            await tab.wait_for("document.getElementById('state').dataset.state === 'failed'")
            said = await tab.text("#state")
            assert await tab.run("document.getElementById('camera-box').hidden")
            await tab.choose_files("#file", picture)
            await tab.wait_for("document.querySelector('#answer .label')")
            return said

    said = asyncio.run(asyncio.wait_for(main(), 120))
    assert said.startswith("the camera cannot be used (")
    assert reason in said
    assert said.endswith("Allow it in the browser, or choose a file.")


@pytest.mark.nightly(seconds=10)
def test_page_tries_the_camera_again_after_its_film_could_not_start(tmp_path: Path) -> None:
    write_image_page(tmp_path)

    async def main() -> None:
        async with browsing(tmp_path / "profile", CAMERA, ACCEPTED) as tab:
            await tab.open((tmp_path / "page/index.html").as_uri())
            await tab.wait_for("document.getElementById('state').dataset.state === 'ready'")
            await tab.run(
                "document.getElementById('video').play = async function () { "
                "window.refused = this.srcObject; throw new Error('no first frame'); }"
            )
            await tab.run("document.getElementById('camera').click()")
            await tab.wait_for("document.getElementById('state').dataset.state === 'failed'")
            assert "the camera cannot be used (no first frame)" in await tab.text("#state")
            states = "window.refused.getTracks().map((track) => track.readyState).join()"
            assert await tab.run(states) == "ended", "the camera's lamp goes out"
            await tab.run("delete document.getElementById('video').play")
            await tab.run("document.getElementById('camera').click()")
            await tab.wait_for("!document.getElementById('camera-box').hidden")
            await tab.run("document.getElementById('snap').click()")
            await tab.wait_for("document.querySelector('#answer .label')")

    asyncio.run(asyncio.wait_for(main(), 120))


# V8 has WASM SIMD on x86-64 only with these instructions.
NO_SIMD = "--js-flags=--no-enable-sse4-1 --no-enable-ssse3 --no-enable-sse3"


def test_page_in_a_browser_without_simd_names_the_expected_browsers(tmp_path: Path) -> None:
    write_image_page(tmp_path)

    async def main() -> str:
        async with browsing(tmp_path / "profile", NO_SIMD) as tab:
            await tab.open((tmp_path / "page/index.html").as_uri())
            await tab.wait_for("document.getElementById('state').dataset.state === 'failed'")
            return await tab.text("#state")

    said = asyncio.run(asyncio.wait_for(main(), 120))
    assert said == (
        "this browser has no WebAssembly SIMD; expected Chrome 91, Firefox 89 or Safari 16.4, or a "
        "newer one. Open the page there."
    )


def test_the_hop_in_a_browser_without_simd_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hop, "_FLAGS", (*hop._FLAGS, NO_SIMD))
    with pytest.raises(ParityError, match=r"hop browser differs: this browser has no WebAssembly"):
        write_browser(tmp_path / "page", image_source(tmp_path, photos()), real_runtime())
    assert not (tmp_path / "page").exists()


def test_error_names_an_operator_that_the_pages_runtime_lacks(tmp_path: Path) -> None:
    source = planted_operator(tmp_path / "source", "Unknown")
    (tmp_path / "page").mkdir()
    write_page(tmp_path / "page", source, real_runtime())
    [found], _ = run_browser_hop(tmp_path / "page", source)
    assert found.status == "differs"
    assert "Unknown" in found.reason
