"""The four data stages run as a user runs them: in real processes, in a separate folder."""

import json
import os
import shutil
import signal
import subprocess
import time
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from slipway.data.augmentation.plan import open_augmented
from slipway.data.merge.new_rows import MergeReport
from slipway.data.store.packed import open_split, read_manifest
from slipway.system import files
from tests import warm_starts
from tests.data.pictures import IMAGE_TYPE, picture, write_folder
from tests.project_params import of_kind, own_content

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "data" / "demo" / "digits.parquet"
pytestmark = pytest.mark.process


def prepare(folder: Path, data_path: Path, **changes: Any) -> None:
    content = own_content()
    params = of_kind(content, changes.get("data__task", content["data"]["task"]))
    params["data"]["path"] = str(data_path)
    for key, value in changes.items():
        section, name = key.split("__")
        params[section][name] = value
    (folder / "params.yaml").write_text(yaml.safe_dump(params))


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def ended(folder: Path, stage: str) -> subprocess.CompletedProcess[str]:
    """Run the stage to its end and return the finished process."""
    return warm_starts.run([f"slipway.stages.{stage}"], folder, environment(), timeout=300)


def run(folder: Path, *stages: str) -> str:
    """Run the stages, all of which must succeed; return stderr of the last one."""
    errors = ""
    for stage in stages:
        done = ended(folder, stage)
        errors = done.stderr
        assert done.returncode == 0, errors
    return errors


def refusal(folder: Path, stage: str) -> str:
    done = ended(folder, stage)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return done.stderr


def digests(folder: Path, *names: str) -> dict[str, str]:
    paths = [path for name in names for path in (folder / name).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): files.sha256_file(path) for path in paths}


@pytest.mark.nightly(seconds=21)
def test_two_runs_of_the_data_stages_on_the_digits_are_identical(tmp_path: Path) -> None:
    prepare(tmp_path, DIGITS, augment__offline_copies=1)
    run(tmp_path, "clean", "split", "precompute", "augment")
    manifest = read_manifest(tmp_path / "data" / "packed")
    assert manifest.classes == [str(digit) for digit in range(10)]
    splits = {
        name: open_split(tmp_path / "data" / "packed", manifest, name, verify=True)
        for name in ("train", "val", "test")
    }
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
    """Return the finished rows that the unfinished work records."""
    markers = (folder / ".work" / "precompute").glob("*/shards/*.json")
    return {number for marker in markers for number in json.loads(marker.read_text())["numbers"]}


@pytest.fixture(name="split_images", scope="module")
def _split_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with 3000 pictures in `images`, cleaned and split. Tests copy it."""
    folder = tmp_path_factory.mktemp("split")
    classes = {
        label: [picture(10_000 * number + seed, 32) for seed in range(1500)]
        for number, label in enumerate("ab")
    }
    write_folder(folder / "images", classes)
    prepare(folder, folder / "images")
    run(folder, "clean", "split")
    return folder


@pytest.mark.parametrize("encoding", ["raw", pytest.param("jpeg", marks=pytest.mark.nightly)])
def test_a_precompute_killed_several_times_resumes_to_the_same_result(
    tmp_path: Path, split_images: Path, encoding: str
) -> None:
    shutil.copytree(split_images / "data", tmp_path / "data")
    changes = {
        "precompute__image_size_px": 160,
        "precompute__channels": 3,
        "precompute__encoding": encoding,
    }
    prepare(tmp_path, split_images / "images", **changes)
    run(tmp_path, "precompute")
    packed = tmp_path / "data" / "packed"
    expected = digests(tmp_path, "data/packed")
    shutil.rmtree(packed)
    killed, seen = 0, [0]
    while killed < 3:
        with warm_starts.start(["slipway.stages.precompute"], tmp_path, environment()) as process:
            while process.poll() is None and len(finished_rows(tmp_path)) <= seen[-1]:
                time.sleep(0.005)
            process.kill()
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


def test_a_precompute_with_edited_params_fails_and_keeps_its_work(
    tmp_path: Path, split_images: Path
) -> None:
    shutil.copytree(split_images / "data", tmp_path / "data")
    prepare(tmp_path, split_images / "images", precompute__image_size_px=160)
    params = tmp_path / "params.yaml"
    before = params.read_text()
    with warm_starts.start(["slipway.stages.precompute"], tmp_path, environment()) as process:
        while not finished_rows(tmp_path):
            assert process.poll() is None
            time.sleep(0.005)
        params.write_text(before.replace("jpeg_quality: 9", "jpeg_quality: 8"))
        assert process.wait(120) == 1
    assert not (tmp_path / "data/packed").exists()
    assert len(finished_rows(tmp_path)) == 3000
    assert [path.name for path in (tmp_path / ".work/precompute").glob("*/store/*.json")] == [
        "manifest.json"
    ]
    params.write_text(before)
    run(tmp_path, "precompute")
    assert read_manifest(tmp_path / "data/packed").classes == ["a", "b"]


@pytest.mark.parametrize(("size_px", "says_so"), [(160, False), (8, True)])
def test_precompute_reports_when_raw_pixels_are_smaller_than_jpeg(
    tmp_path: Path, size_px: int, says_so: bool
) -> None:
    write_folder(
        tmp_path / "images",
        {
            label: [picture(100 * number + seed) for seed in range(20)]
            for number, label in enumerate("ab")
        },
    )
    prepare(
        tmp_path,
        tmp_path / "images",
        precompute__encoding="jpeg",
        precompute__image_size_px=size_px,
    )
    run(tmp_path, "clean", "split")
    done = ended(tmp_path, "precompute")
    assert done.returncode == 0, done.stderr
    assert "training images as JPEG take" in done.stdout
    assert ("precompute.encoding raw is smaller here" in done.stdout) is says_so


TRANSFORM = """
def halve(image):
    return image.reduce(2), {"width": image.width}
"""


@pytest.mark.nightly(seconds=40)
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (extra ray)")
def test_a_user_transform_gives_the_same_result_locally_and_on_ray(tmp_path: Path) -> None:
    write_folder(
        tmp_path / "images",
        {
            label: [picture(500 * number + seed, 16) for seed in range(300)]
            for number, label in enumerate("ab")
        },
    )
    (tmp_path / "transforms").mkdir()
    (tmp_path / "transforms" / "__init__.py").write_text(TRANSFORM)
    changes = {
        "precompute__transform": "transforms:halve",
        "precompute__train_size_px": 24,
        "precompute__num_workers": 2,
    }
    prepare(tmp_path, tmp_path / "images", **changes)
    run(tmp_path, "clean", "split", "precompute")
    expected = digests(tmp_path, "data")
    table = pq.read_table(tmp_path / "data" / "packed" / "val" / "transform.parquet")
    assert set(table["width"].to_pylist()) == {16}
    prepare(tmp_path, tmp_path / "images", **changes, data__engine="ray")
    run(tmp_path, "clean", "split", "precompute")
    assert digests(tmp_path, "data") == expected
    assert list((tmp_path / ".work").glob("ray*")) == []


def test_two_precomputes_at_once_are_refused(tmp_path: Path) -> None:
    write_folder(
        tmp_path / "images",
        {
            label: [picture(100 * number + seed) for seed in range(20)]
            for number, label in enumerate("ab")
        },
    )
    prepare(tmp_path, tmp_path / "images")
    run(tmp_path, "clean", "split")
    with files.lock(tmp_path / ".work" / "precompute" / "lock", "precompute"):
        errors = refusal(tmp_path, "precompute")
    assert f"precompute is already running as process {os.getpid()}" in errors
    run(tmp_path, "precompute")


def test_too_much_bad_data_fails_and_keeps_the_list_for_the_user(tmp_path: Path) -> None:
    write_folder(
        tmp_path / "images",
        {"a": [picture(1), picture(2), b"words"], "b": [picture(3), b"", b"more words"]},
    )
    prepare(tmp_path, tmp_path / "images")
    errors = refusal(tmp_path, "clean")
    assert "3 of 6 samples are bad" in errors
    assert "Every refused sample is in .work/clean/quarantine.parquet" in errors
    assert pq.read_table(tmp_path / ".work" / "clean" / "quarantine.parquet").num_rows == 3
    assert not (tmp_path / "data").exists()


def test_the_summary_line_of_clean_counts_bad_images_and_duplicates_separately(
    tmp_path: Path,
) -> None:
    write_folder(
        tmp_path / "images",
        {
            "a": [picture(1), picture(2), picture(1), b"words"],
            "b": [picture(3), picture(4), picture(3)],
        },
    )
    prepare(tmp_path, tmp_path / "images", clean__max_bad_fraction=0.5)
    printed = ended(tmp_path, "clean").stdout
    assert "read 7, kept 4, bad 1, duplicates 2" in printed
    assert "\nrefused: a/3.png (undecodable), a/2.png (exact_duplicate), b/" in printed


def test_error_names_an_image_that_changed_after_cleaning(tmp_path: Path) -> None:
    write_folder(
        tmp_path / "images",
        {
            label: [picture(100 * number + seed) for seed in range(20)]
            for number, label in enumerate("ab")
        },
    )
    prepare(tmp_path, tmp_path / "images")
    run(tmp_path, "clean", "split")
    (tmp_path / "images" / "a" / "3.png").write_bytes(picture(999))
    errors = refusal(tmp_path, "precompute")
    assert "1 of 40 images changed since they were cleaned" in errors
    assert "a/3.png" in errors
    assert not (tmp_path / "data" / "packed").exists()


def test_error_for_a_forbidden_flip_names_both_keys(tmp_path: Path) -> None:
    prepare(tmp_path, DIGITS, augment__horizontal_flip=0.5)
    errors = refusal(tmp_path, "augment")
    assert "augment.horizontal_flip is 0.5, but augment.forbid names 'horizontal_flip'" in errors


@pytest.mark.parametrize(
    "kind",
    [
        "zip",
        *(pytest.param(kind, marks=pytest.mark.nightly(seconds=8)) for kind in ("tar", "gztar")),
    ],
)
def test_the_data_stages_give_the_same_results_for_an_archive_as_for_its_folder(
    tmp_path: Path, kind: str
) -> None:
    write_folder(
        tmp_path / "images",
        {
            label: [picture(100 * number + seed) for seed in range(40)]
            for number, label in enumerate("ab")
        },
    )
    results = []
    for place in ("of_folder", "of_archive"):
        (tmp_path / place).mkdir()
        packed = (
            shutil.make_archive(str(tmp_path / "images"), kind, tmp_path, "images")
            if place == "of_archive"
            else tmp_path / "images"
        )
        prepare(tmp_path / place, Path(packed))
        run(tmp_path / place, "clean", "split", "precompute")
        results.append(digests(tmp_path / place, "data", "reports"))
    assert results[0] == results[1]
    shutil.rmtree(tmp_path / "of_archive" / ".work")  # whoever clears it away loses nothing
    run(tmp_path / "of_archive", "precompute")
    assert digests(tmp_path / "of_archive", "data", "reports") == results[0]


def test_an_archive_with_bad_members_stops_clean_with_an_error_that_names_all(
    tmp_path: Path,
) -> None:
    with zipfile.ZipFile(tmp_path / "evil.zip", "w") as archive:
        for name in ("a/1.png", "../../evil.png", "b/2.png", "/evil.png"):
            archive.writestr(name, b"x")
    prepare(tmp_path, tmp_path / "evil.zip")
    errors = refusal(tmp_path, "clean")
    assert "has 2 members that may not be" in errors
    assert "'../../evil.png': a path that leads out" in errors
    assert (tmp_path / ".work/archives/refused.txt").read_text().count("\n") == 2
    assert not list(tmp_path.parent.rglob("evil.png"))


def test_clean_reports_the_first_recent_row_of_merged_data(tmp_path: Path) -> None:
    images = pa.array(
        [{"bytes": picture(seed, size_px=16), "path": None} for seed in range(40)], IMAGE_TYPE
    )
    mark = MergeReport(num_base=30, added=[*range(10)]).recent_mark(4, tmp_path)
    merged = pa.table({"image": images, "label": ["cat", "dog"] * 20})
    pq.write_table(merged.replace_schema_metadata(mark), tmp_path / "next.parquet")
    prepare(tmp_path, tmp_path / "next.parquet")
    ended(tmp_path, "clean")
    assert json.loads((tmp_path / "reports/clean.json").read_bytes())["recent_from"] == 34


def test_clean_and_split_use_split_folders_as_the_given_split(tmp_path: Path) -> None:
    for place in range(60):
        folder = (
            tmp_path
            / "images"
            / ("Train", "Train", "Train", "TEST")[place % 4]
            / "ab"[place // 4 % 2]
        )
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{place}.png").write_bytes(picture(place, size_px=16))
    shutil.copy(
        tmp_path / "images" / "TEST" / "a" / "3.png",
        tmp_path / "images" / "Train" / "a" / "leak.png",
    )
    (tmp_path / "images" / "README.md").write_text("pictures")
    prepare(tmp_path, Path("images"))
    said = ended(tmp_path, "clean").stdout
    assert (
        "given split: Train/ -> train (45 rows), TEST/ -> test (15 rows); "
        "`split` cuts val from train" in said
    )
    assert "copies of rows in another given split: 1" in said
    split_output = ended(tmp_path, "split").stdout
    assert "test 15 (given)" in split_output
    assert "val is cut from train" in split_output
    rows = pq.read_table(tmp_path / "data" / "split" / "rows.parquet").to_pylist()
    assert {(row["source"].split("/")[0], row["split"]) for row in rows} == {
        ("Train", "train"),
        ("Train", "val"),
        ("TEST", "test"),
    }
    assert {row["label"] for row in rows} == {"a", "b"}
    assert json.loads((tmp_path / "reports" / "split.json").read_text())["cut_from_train"] == [
        "val"
    ]
    run(tmp_path, "precompute")
    manifest = read_manifest(tmp_path / "data" / "packed")
    assert (
        sum(
            len(open_split(tmp_path / "data" / "packed", manifest, name))
            for name in ("train", "val", "test")
        )
        == 60
    )


def test_error_of_a_stage_that_runs_too_early_names_the_missing_input(tmp_path: Path) -> None:
    prepare(tmp_path, DIGITS)
    assert "data/clean/rows.parquet is missing" in refusal(tmp_path, "split")
