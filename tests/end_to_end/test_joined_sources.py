"""Several sources in one folder, followed by DVC: a new, changed or removed file runs `clean`."""

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.end_to_end.project import copy_checkout, draw_shapes

pytestmark = pytest.mark.process


@pytest.mark.nightly(seconds=60)
def test_clean_runs_again_after_any_change_of_a_file_and_only_then(tmp_path: Path) -> None:
    project = copy_checkout(tmp_path)
    raw = project.path / "data" / "raw"
    draw_shapes(raw / "north")
    shutil.copytree(raw / "north", raw / "spare")
    (raw / "south").mkdir()
    for shape in ("ring", "square"):
        (raw / "north" / shape).rename(raw / "south" / shape)
    project.set_params(
        {
            "data": {"path": "data/raw", "sources": ["[ns]o*"]},
            "split": {"assignment": "exact"},
        }
    )
    project.set_value("clean.rules.near_duplicate", None)

    def rows() -> dict[str, int]:
        """Run `dvc repro`; return the number of rows of each source."""
        assert "Running stage 'clean'" in project.shell("dvc repro split")
        assert "Running stage" not in project.shell("dvc repro split")
        table = pq.read_table(project.path / "data/clean/rows.parquet")
        names = [source.partition("/")[0] for source in table["source"].to_pylist()]
        return {name: names.count(name) for name in sorted(set(names))}

    assert rows() == {"north": 32, "south": 32}
    picture = min((raw / "north" / "cross").iterdir())
    shutil.copy(raw / "spare" / "ring" / "02.png", raw / "north" / "cross" / "new.png")
    (raw / "south" / "ring" / "02.png").unlink()
    assert rows() == {"north": 33, "south": 31}
    picture.write_bytes(b"no picture")
    assert rows() == {"north": 32, "south": 31}
    shutil.copytree(raw / "spare", raw / "nowhere")
    shutil.rmtree(raw / "south")
    shutil.rmtree(raw / "north")
    assert rows() == {"nowhere": 64}
    shutil.rmtree(raw / "nowhere")
    assert "'[ns]o*' matches nothing in data/raw" in project.shell(
        "dvc repro split", succeeds=False
    )
