"""The page's JavaScript encodes texts as Slipway does, tested in Node."""

import json
import random
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipway.export.targets.browser import texts as page_texts
from slipway.export.targets.browser.texts import page_contract
from slipway.inputs.texts import TextContract, encode_texts, read_text
from tests.encoder_folders import word_piece
from tests.export.targets.sources import HOSTILE, pairs, roberta
from tests.sentences import sentences
from tests.serving.bundles import TEXTS
from tests.tokens import token_contract

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


def in_node(folder: Path, contract: dict[str, Any], rows: list[dict[str, Any]]) -> list[Any]:
    script, given = folder / "encode.js", folder / "rows.json"
    script.write_text(SCRIPT)
    given.write_text(json.dumps({"contract": contract, "rows": rows}))
    command = ["node", str(script), str(PAGE / "texts.js"), str(given)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return list(map(json.loads, done.stdout.splitlines()))


def test_page_reads_and_refuses_the_same_hostile_texts_as_training(tmp_path: Path) -> None:
    good = [{"text": text} for text in HOSTILE]
    bad: list[dict[str, Any]] = [
        {},
        {"text": " \n\x85"},
        {"text": "\u200b \ufeff"},
        {"text": 3},
        {"other": "x"},
        {"text": "é" * 1001},
    ]
    found = in_node(tmp_path, page_contract(TEXTS), [*good, *bad])
    expected = encode_texts([read_text(row, TEXTS) for row in good], TEXTS)
    for text, row, own in zip(HOSTILE, found, expected, strict=False):
        assert np.array_equal(row, own), text
    refusals = found[len(good) :]
    assert [isinstance(one, str) and "; expected " in one for one in refusals] == [True] * len(bad)


def hostile_texts() -> list[str]:
    chance = random.Random(3)
    letters = "aé漢1½٣ '\n_😀\u0301\u200b\ufeff\u02bc\U000113c5\u2028sS"
    texts = [text for _, text in sentences(40, seed=6)]
    texts += ["it's we'll  I'D 'S  12a 3", *HOSTILE]
    texts += ["x" + "".join(chance.choices(letters, k=40)) for _ in range(60)]
    return texts + ["".join(map(chr, range(code, code + 60))) for code in range(0x100, 0x3400, 60)]


@pytest.mark.parametrize(
    "contract",
    [
        token_contract(max_bytes=256, max_tokens=300),
        token_contract(max_bytes=200, max_tokens=30, tokenizer=word_piece(), masked=["email"]),
        token_contract(
            max_bytes=120, max_tokens=23, tokenizer=word_piece(), columns=["a", "b"], is_pair=True
        ),
        token_contract(
            max_bytes=120, max_tokens=40, tokenizer=roberta(), columns=["a", "b"], is_pair=True
        ),
        TEXTS.model_copy(update={"max_bytes": 200, "masked": ["email", "phone", "card"]}),
        TEXTS.model_copy(update={"columns": ["a", "b"], "masked": ["card"]}),
    ],
    ids=["BPE", "WordPiece", "WordPiece of pairs", "BPE of pairs", "masked bytes", "two columns"],
)
def test_page_encodes_texts_and_pairs_as_training_does(
    contract: TextContract, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_CODES", "_ALL_CODES"):
        monkeypatch.setattr(page_texts, name, 0x17000)  # takes seconds for all of them
    texts = hostile_texts()
    rows = pairs(texts) if len(contract.columns) > 1 else [{"text": text} for text in texts]
    expected = encode_texts([read_text(row, contract) for row in rows], contract)
    found = in_node(tmp_path, page_contract(contract), rows)
    for given, row, own in zip(rows, found, expected, strict=True):
        assert np.array_equal(row, own), given
