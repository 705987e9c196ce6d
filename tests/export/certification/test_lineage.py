"""The digest of the raw data is copied from dvc.lock into the bundle."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from slipway.artifacts.bundle import DataSource
from slipway.export.certification.lineage import trace_lineage
from slipway.system import files
from slipway.system.errors import SchemaError

FILE = {"path": "data/raw.parquet", "hash": "md5", "md5": "ab" * 16, "size": 123}
FOLDER = {"path": "data/raw", "hash": "md5", "md5": "cd" * 16 + ".dir", "size": 456, "nfiles": 7}
CODE = {"path": "slipway/stages/clean.py", "hash": "md5", "md5": "ef" * 16, "size": 1}


def lineage_of(folder: Path, path: str, *dependencies: dict[str, Any]) -> DataSource | None:
    lock = folder / "dvc.lock"
    lock.write_text(
        yaml.safe_dump(
            {
                "schema": "2.0",
                "stages": {
                    "clean": {"cmd": "x", "deps": list(dependencies)},
                    "split": {"cmd": "y"},
                },
            }
        )
    )
    return trace_lineage({"data": {"path": path}}, [], lock).data


def test_the_lineage_names_raw_files_and_folders_with_their_digests(tmp_path: Path) -> None:
    found = lineage_of(tmp_path, "data/raw.parquet", CODE, FILE)
    assert found == DataSource(
        path="data/raw.parquet", hash="md5", digest="ab" * 16, bytes=123, files=None
    )
    found = lineage_of(tmp_path, "data/raw", CODE, FOLDER)
    assert found == DataSource(
        path="data/raw", hash="md5", digest="cd" * 16 + ".dir", bytes=456, files=7
    )


@pytest.mark.parametrize("dependencies", [[], [CODE], [FOLDER], [{"path": "data/raw.parquet"}]])
def test_lineage_fields_missing_from_dvc_lock_are_null(
    tmp_path: Path, dependencies: list[dict[str, Any]]
) -> None:
    assert lineage_of(tmp_path, "data/raw.parquet", *dependencies) is None


def test_the_data_source_is_null_without_dvc_lock(tmp_path: Path) -> None:
    assert trace_lineage({"data": {"path": "data/raw"}}, [], tmp_path / "dvc.lock").data is None


def test_class_names_yes_and_no_in_dvc_lock_are_words_as_dvc_writes_them(tmp_path: Path) -> None:
    lock = tmp_path / "dvc.lock"
    lock.write_text("stages:\n  clean:\n    label_map:\n      Yes: yes\n      noo: no\n")
    expected = files.digest_json({"label_map": {"Yes": "yes", "noo": "no"}})
    assert trace_lineage({}, [], lock).digests == {"dvc.lock#clean": expected}


@pytest.mark.parametrize("text", ["stages: [", "stages: 3", "a: 1\na: 2"])
def test_a_damaged_dvc_lock_is_refused_with_the_way_to_restore_it(
    text: str, tmp_path: Path
) -> None:
    lock = tmp_path / "dvc.lock"
    lock.write_text(text)
    with pytest.raises(SchemaError, match="with git, or remove it"):
        trace_lineage({}, [], lock)
