"""Thousands of images, some corrupted in eight ways: `clean` refuses and names exactly these."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from slipway.system.files import sha256_bytes
from tests.data.pictures import encode
from tests.data.test_data_stages import prepare, refusal, run

NUM_OF_EACH = 13
pytestmark = pytest.mark.process


def flipped(payload: bytes, position: int) -> bytes:
    return payload[:position] + bytes([payload[position] ^ 0x15]) + payload[position + 1 :]


def _garbage(payload: bytes) -> bytes:
    return np.random.default_rng(len(payload)).integers(128, 256, 300, dtype=np.uint8).tobytes()


CORRUPTIONS: dict[str, Callable[[bytes], bytes | None]] = {
    "empty": lambda payload: b"",
    "truncated": lambda payload: payload[:-20],
    "garbage": _garbage,
    "wrong extension": lambda payload: b"%PDF-1.7 a document that is called .jpg",
    "flipped byte": lambda payload: flipped(payload, len(payload) - 20),
    "zeroed tail": lambda payload: payload[:-60] + bytes(60),
    "pixel bomb": lambda payload: encode(Image.new("1", (8000, 8000))),
    "unreadable": lambda payload: None,  # a link to nothing: as root no file is without rights
}
RULES = {
    "empty": {"empty"},
    "truncated": {"truncated"},
    "garbage": {"undecodable"},
    "wrong extension": {"undecodable"},
    "flipped byte": {"digest_mismatch", "truncated"},
    "zeroed tail": {"digest_mismatch", "truncated"},
    "pixel bomb": {"pixel_bomb"},
    "unreadable": {"missing_file"},
}


def write_images(root: Path, num_images: int) -> dict[str, str]:
    """Write small photographs in two classes; return the kind of each corrupted one."""
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (num_images, 3, 3, 3), dtype=np.uint8)
    corrupted: dict[str, str] = {}
    kinds = [kind for kind in CORRUPTIONS for _ in range(NUM_OF_EACH)]
    chosen = dict(
        zip(random.choice(num_images, len(kinds), replace=False).tolist(), kinds, strict=True)
    )
    lines = []
    for label in ("cat", "dog"):
        (root / label).mkdir(parents=True)
    for number in range(num_images):
        source = f"{('cat', 'dog')[number % 2]}/{number:05}.jpg"
        payload = encode(
            Image.fromarray(pixels[number]).resize((24, 20), Image.Resampling.BICUBIC),
            "JPEG",
            quality=90,
        )
        lines.append(f"{sha256_bytes(payload)}  {source}\n")
        kind = chosen.get(number)
        if kind is not None:
            corrupted[source] = kind
        _write(root / source, payload if kind is None else CORRUPTIONS[kind](payload))
    (root / "SHA256SUMS").write_text("".join(lines))
    return corrupted


def _write(path: Path, payload: bytes | None) -> None:
    if payload is None:
        path.symlink_to("nowhere.jpg")
    else:
        path.write_bytes(payload)


@pytest.mark.parametrize("num_images", [2_500, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_every_corrupted_image_is_named_and_no_good_one_is_dropped(
    tmp_path: Path, num_images: int
) -> None:
    corrupted = write_images(tmp_path / "images", num_images)
    changes = {
        "data__checksums": str(tmp_path / "images" / "SHA256SUMS"),
        "clean__max_pixels": 1_000_000,
    }
    prepare(tmp_path, tmp_path / "images", **changes)
    run(tmp_path, "clean")
    rules = {
        row["source"]: row["rule"]
        for row in pq.read_table(tmp_path / "data/clean/quarantine.parquet").to_pylist()
    }
    assert set(rules) == set(corrupted)
    assert {
        source: rules[source]
        for source in corrupted
        if rules[source] not in RULES[corrupted[source]]
    } == {}
    kept = pq.read_table(tmp_path / "data/clean/rows.parquet").num_rows
    assert kept + len(rules) == num_images
    prepare(tmp_path, tmp_path / "images", clean__max_bad_fraction=0.01, **changes)
    text = refusal(tmp_path, "clean")
    assert f"{len(corrupted)} of {num_images} samples are bad" in text
    assert all(f"  {rule}: " in text for rule in set(rules.values()))


def test_the_report_without_checksums_warns_of_undetected_flipped_bytes(tmp_path: Path) -> None:
    """Control: some of the flipped bytes decode, so they are kept without the checksums."""
    corrupted = write_images(tmp_path / "images", 2_500)
    (tmp_path / "images" / "SHA256SUMS").unlink()
    prepare(tmp_path, tmp_path / "images", clean__max_pixels=1_000_000)
    run(tmp_path, "clean")
    refused = set(pq.read_table(tmp_path / "data/clean/quarantine.parquet")["source"].to_pylist())
    missed = {corrupted[source] for source in set(corrupted) - refused}
    assert missed
    assert missed <= {"flipped byte", "zeroed tail"}
    report = json.loads((tmp_path / "reports/clean.json").read_text())
    assert "stays undetected" in report["not_checked"]["digest_mismatch"]
