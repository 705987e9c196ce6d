"""The page's JavaScript decodes and resizes PNGs as Slipway does, tested in Node."""

import base64
import io
import itertools
import json
import random
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from slipway.inputs.images import ImageContract, array_from_bytes
from slipway.system.errors import ImageError
from tests.export.targets.pngs import FILTERS, MODES, chunk, contract_of, every_kind, raw_png

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        shutil.which("node") is None,
        reason="there is no Node here (Debian: apt-get install nodejs)",
    ),
]
PAGE = files("slipway.export.targets.browser") / "page"
# Decodes each case, one JSON object a line, and prints its pixels in base64 or its error.
SCRIPT = """
const fs = require('fs');
require(process.argv[2]);
(async () => {
  for (const line of fs.readFileSync(process.argv[3], 'utf8').trim().split('\\n')) {
    const { contract, png } = JSON.parse(line);
    try {
      const pixels = await slipway.images.fromBytes(
        new Uint8Array(Buffer.from(png, 'base64')), contract);
      console.log(Buffer.from(pixels).toString('base64'));
    } catch (error) { console.log('error: ' + error.message); }
  }
})();
"""


def in_node(folder: Path, cases: list[tuple[ImageContract, bytes]]) -> list[str]:
    script, given = folder / "decode.js", folder / "cases.jsonl"
    script.write_text(SCRIPT)
    given.write_text(
        "\n".join(
            json.dumps(
                {"contract": contract.model_dump(), "png": base64.b64encode(payload).decode()}
            )
            for contract, payload in cases
        )
    )
    command = ["node", str(script), str(PAGE / "images.js"), str(given)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.splitlines()


def differing(folder: Path, cases: list[tuple[ImageContract, bytes]]) -> list[Any]:
    """Return the cases whose pixels, or whose refusals, differ from Slipway's."""
    found = in_node(folder, cases)
    assert len(found) == len(cases)
    wrong: list[Any] = []
    for number, ((contract, payload), answer) in enumerate(zip(cases, found, strict=True)):
        try:
            expected = array_from_bytes(payload, contract).ravel()
        except ImageError as error:
            if not answer.startswith("error: "):
                wrong.append((number, str(error), "no error"))
            continue
        if answer.startswith("error: "):
            wrong.append((number, "pixels", answer))
            continue
        pixels = np.frombuffer(base64.b64decode(answer), np.uint8)
        if not np.array_equal(pixels, expected):
            worst = int(np.abs(pixels.astype(int) - expected).max())
            wrong.append((number, contract.resize_mode, contract.interpolation, worst))
    return wrong


def test_page_decodes_every_kind_of_png_to_the_pixels_of_training(tmp_path: Path) -> None:
    assert differing(tmp_path, every_kind(random.Random(5))) == []


def test_page_treats_transparency_and_orientation_as_training_does(tmp_path: Path) -> None:
    chance, cases = random.Random(6), []
    transparent = {0: b"\0\1", 2: b"\0\1\0\2\0\3", 3: b"\x00\x80\xff\x10"}
    for colour_type, depth in ((0, 1), (0, 2), (0, 4), (0, 8), (0, 16), (2, 8), (3, 4), (3, 8)):
        extra = chunk(b"tRNS", transparent[colour_type])
        png = raw_png(colour_type, depth, (17, 11), chance, extra=extra)
        cases += [(contract_of("stretch", "bilinear", channels), png) for channels in (1, 3)]
    for orientation in range(1, 9):
        picture = Image.fromarray(
            np.frombuffer(chance.randbytes(13 * 7 * 3), np.uint8).reshape(7, 13, 3)
        )
        exif = Image.Exif()
        exif[0x0112] = orientation
        stream = io.BytesIO()
        picture.save(stream, "PNG", exif=exif)
        cases.append((contract_of("pad", "bicubic", 3), stream.getvalue()))
    assert differing(tmp_path, cases) == []


def test_page_resizes_to_the_pixels_of_training_by_every_mode_and_filter(tmp_path: Path) -> None:
    chance, cases = random.Random(7), []
    for mode, interpolation, _ in itertools.product(MODES, FILTERS, range(6)):
        size = (chance.randrange(1, 90), chance.randrange(1, 90))
        contract = contract_of(mode, interpolation, chance.choice((1, 3)), chance.choice((8, 33)))
        cases.append((contract, raw_png(2, 8, size, chance)))
    assert differing(tmp_path, cases) == []


def test_page_refuses_damaged_files_with_fault_expectation_and_fix(tmp_path: Path) -> None:
    chance = random.Random(8)
    whole = raw_png(2, 8, (20, 20), chance)
    flipped = bytearray(whole)
    flipped[60] ^= 1
    webp = io.BytesIO()
    Image.new("RGB", (4, 4)).save(webp, "WEBP")
    broken = [b"", whole[: len(whole) // 2], bytes(flipped), webp.getvalue()]
    broken.append(raw_png(0, 8, (200, 200), chance))  # more than max_pixels
    found = in_node(tmp_path, [(contract_of("stretch", "bilinear", 3), one) for one in broken])
    for answer in found:
        assert answer.startswith("error: "), answer
        assert "; expected " in answer
        assert answer.endswith(".")
