"""The four data stages as a user runs them: real processes in a folder of their own."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from slipway import files
from slipway.data.augmentation import open_augmented
from slipway.data.packed import open_split, read_manifest
from tests.data.pictures import picture, write_folder

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "data" / "demo" / "digits.parquet"
pytestmark = pytest.mark.slow


def prepare(folder: Path, data_path: Path, **changes: Any) -> None:
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    params["data"]["path"] = str(data_path)
    for key, value in changes.items():
        section, name = key.split("__")
        params[section][name] = value
    (folder / "params.yaml").write_text(yaml.safe_dump(params))


def start(folder: Path, stage: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", f"stages.{stage}"]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(folder: Path, *stages: str) -> str:
    """What the last of the stages wrote to stderr, all of them having succeeded."""
    errors = ""
    for stage in stages:
        process = start(folder, stage)
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    return errors


def refusal(folder: Path, stage: str) -> str:
    process = start(folder, stage)
    _, errors = process.communicate()
    assert process.returncode == 1
    assert "Traceback" not in errors
    return errors


def digests(folder: Path, *names: str) -> dict[str, str]:
    paths = [path for name in names for path in (folder / name).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): files.sha256_file(path) for path in paths}


def test_digits_go_the_whole_way_twice_with_the_same_result(tmp_path: Path) -> None:
    prepare(tmp_path, DIGITS, augment__offline_copies=1)
    run(tmp_path, "clean", "split", "precompute", "augment")
    manifest = read_manifest(tmp_path / "data" / "packed")
    assert manifest.classes == [str(digit) for digit in range(10)]
    splits = {name: open_split(tmp_path / "data" / "packed", manifest, name, verify=True) for name in ("train", "val", "test")}
    assert sum(len(split) for split in splits.values()) == pq.read_metadata(DIGITS).num_rows
    plan, copies = open_augmented(tmp_path / "data" / "augmented", manifest, verify=True)
    assert copies is not None
    assert len(copies) == len(splits["train"])
    assert plan.rotation_deg == 10
    first = digests(tmp_path, "data", "reports")
    run(tmp_path, "clean", "split", "precompute")
    assert digests(tmp_path, "data", "reports") == first
    assert not list(tmp_path.rglob("*.partial"))


def finished_rows(folder: Path) -> set[int]:
    """The rows that the unfinished work has written down."""
    markers = (folder / ".work" / "precompute").glob("*/shards/*.json")
    return {number for marker in markers for number in json.loads(marker.read_text())["numbers"]}


@pytest.mark.parametrize("encoding", ["raw", "jpeg"])
def test_a_precompute_killed_again_and_again_goes_on_and_gives_the_same(tmp_path: Path, encoding: str) -> None:
    classes = {label: [picture(10_000 * number + seed, 32) for seed in range(1500)] for number, label in enumerate("ab")}
    write_folder(tmp_path / "images", classes)
    prepare(tmp_path, tmp_path / "images", precompute__image_size_px=160, precompute__channels=3, precompute__encoding=encoding)
    run(tmp_path, "clean", "split", "precompute")
    packed = tmp_path / "data" / "packed"
    expected = digests(tmp_path, "data/packed")
    shutil.rmtree(packed)
    killed, seen = 0, [0]
    while killed < 3:
        process = start(tmp_path, "precompute")
        while process.poll() is None and len(finished_rows(tmp_path)) <= seen[-1]:
            time.sleep(0.005)
        process.kill()
        process.communicate()
        if process.returncode != -signal.SIGKILL:
            break
        assert not packed.exists()
        killed += 1
        seen.append(len(finished_rows(tmp_path)))
    assert killed >= 2
    assert seen == sorted(set(seen)), "every run added to what was there"
    if not packed.exists():
        run(tmp_path, "precompute")
    assert digests(tmp_path, "data/packed") == expected
    assert [path.name for path in (tmp_path / ".work" / "precompute").iterdir()] == ["lock"]


def test_two_precomputes_at_once_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path / "images", {label: [picture(100 * number + seed) for seed in range(20)] for number, label in enumerate("ab")})
    prepare(tmp_path, tmp_path / "images")
    run(tmp_path, "clean", "split")
    with files.lock(tmp_path / ".work" / "precompute" / "lock", "precompute"):
        errors = refusal(tmp_path, "precompute")
    assert f"precompute is already running as process {os.getpid()}" in errors
    run(tmp_path, "precompute")


def test_too_much_bad_data_fails_and_keeps_the_list_for_the_user(tmp_path: Path) -> None:
    write_folder(tmp_path / "images", {"a": [picture(1), picture(2), b"words"], "b": [picture(3), b"", b"more words"]})
    prepare(tmp_path, tmp_path / "images")
    errors = refusal(tmp_path, "clean")
    assert "3 of 6 samples are bad" in errors
    assert "Every refused sample is in .work/clean/quarantine.parquet" in errors
    assert pq.read_table(tmp_path / ".work" / "clean" / "quarantine.parquet").num_rows == 3
    assert not (tmp_path / "data").exists()


def test_an_image_that_changed_after_cleaning_is_refused_by_name(tmp_path: Path) -> None:
    write_folder(tmp_path / "images", {label: [picture(100 * number + seed) for seed in range(20)] for number, label in enumerate("ab")})
    prepare(tmp_path, tmp_path / "images")
    run(tmp_path, "clean", "split")
    (tmp_path / "images" / "a" / "3.png").write_bytes(picture(999))
    errors = refusal(tmp_path, "precompute")
    assert "1 of 40 images are not what they were" in errors
    assert "a/3.png" in errors
    assert not (tmp_path / "data" / "packed").exists()


def test_a_forbidden_flip_is_refused_naming_both_keys(tmp_path: Path) -> None:
    prepare(tmp_path, DIGITS, augment__horizontal_flip=0.5)
    errors = refusal(tmp_path, "augment")
    assert "augment.horizontal_flip is 0.5, but augment.forbid names 'horizontal_flip'" in errors


def test_a_stage_before_its_turn_names_what_is_missing(tmp_path: Path) -> None:
    prepare(tmp_path, DIGITS)
    assert "data/clean/rows.parquet is missing" in refusal(tmp_path, "split")
