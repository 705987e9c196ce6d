"""Generated image files, valid or not, crash no stage, and each file gets a verdict."""

import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from slipway.data.store.packed import open_split, read_manifest
from slipway.inputs.images import ImageContract, array_from_bytes
from tests.data.test_data_stages import prepare, run
from tests.inputs.image_files import FAMILIES
from tests.inputs.test_image_files import PREMULTIPLIED_GREY, lab
from tests.inputs.verdicts import MAX_PIXELS, READ, UNREADABLE, verdict

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore::UserWarning:PIL"),  # Pillow warns of damaged tags
]


def test_clean_and_precompute_read_what_can_be_read_and_name_the_rest(tmp_path: Path) -> None:
    payloads = {
        f"{number}": content for number, content in enumerate((PREMULTIPLIED_GREY, lab(90, 60, 20)))
    }
    for family in FAMILIES.values():
        files = list(family())
        for name, payload in files[:: len(files) // 60]:
            payloads[re.sub(r"\W+", "_", name)] = payload
    root = tmp_path / "images"
    for position, (name, payload) in enumerate(payloads.items()):
        path = root / ("cat", "dog")[position % 2] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".img").write_bytes(payload)
    changes = {
        "clean__max_pixels": MAX_PIXELS,
        "clean__max_bad_fraction": 0.95,
        "clean__min_side_px": 1,
    }
    prepare(tmp_path, root, **changes)
    run(tmp_path, "clean", "split", "precompute")
    quarantine = pq.read_table(tmp_path / "data/clean/quarantine.parquet").to_pylist()
    refused = {
        Path(row["source"]).stem: row["rule"] for row in quarantine if row["rule"] in UNREADABLE
    }
    expected = {name: verdict(name, payload) for name, payload in payloads.items()}
    assert refused == {name: rule for name, rule in expected.items() if rule != READ}
    manifest = read_manifest(tmp_path / "data/packed")
    assert isinstance(manifest.input, ImageContract)
    packed = 0
    for name in manifest.splits:
        split = open_split(tmp_path / "data/packed", manifest, name, verify=True)
        for source, pixels in zip(split.sources, split.inputs[:], strict=True):
            assert np.array_equal(
                pixels, array_from_bytes(payloads[Path(source).stem], manifest.input)
            )
            packed += 1
    assert packed >= 50
