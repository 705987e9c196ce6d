"""The page's JavaScript against Slipway's own preprocessing of texts, in Node."""

import json
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from slipway.export.targets.exported import exported_contract
from slipway.inputs.texts import encode_texts, read_text
from tests.export.targets.sources import HOSTILE
from tests.serving.bundles import TEXTS

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        shutil.which("node") is None,
        reason="there is no Node here (Debian: apt-get install nodejs)",
    ),
]
PAGE = files("slipway.export.targets.browser") / "page"
SCRIPT = """
globalThis.slipway = {};
require(process.argv[2]);
const { contract, rows } = JSON.parse(require('fs').readFileSync(process.argv[3], 'utf8'));
for (const row of rows) {
  try {
    console.log(JSON.stringify(Array.from(slipway.texts.fromRow(row, contract))));
  } catch (error) { console.log(JSON.stringify(error.message)); }
}
"""


def test_the_page_reads_hostile_texts_as_we_do_and_refuses_the_same(tmp_path: Path) -> None:
    script, given = tmp_path / "encode.js", tmp_path / "rows.json"
    script.write_text(SCRIPT)
    good = [{"text": text} for text in HOSTILE]
    bad = [{}, {"text": " \n\x85"}, {"text": 3}, {"other": "x"}, {"text": "é" * 1001}]
    given.write_text(json.dumps({"contract": exported_contract(TEXTS), "rows": [*good, *bad]}))
    command = ["node", str(script), str(PAGE / "texts.js"), str(given)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    found = list(map(json.loads, done.stdout.splitlines()))
    expected = encode_texts([read_text(row, TEXTS) for row in good], TEXTS)
    for text, row, own in zip(HOSTILE, found, expected, strict=False):
        assert np.array_equal(row, own), text
    refusals = found[len(good) :]
    assert [isinstance(one, str) and "; expected " in one for one in refusals] == [True] * len(bad)
