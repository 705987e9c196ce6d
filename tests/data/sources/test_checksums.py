"""Tests of the user's checksums: altered, missing and unlisted files, and malformed lists."""

import subprocess
import zipfile
from functools import partial
from pathlib import Path

import pytest

from slipway.config.sections import DataParams
from slipway.data.rules.result import Cleaned
from slipway.data.sources.archives import ArchiveLimits, unpacked
from slipway.data.sources.checksums import read_checksums
from slipway.data.sources.sources import read_samples
from slipway.data.tables.clean_step import clean_rows
from slipway.system.errors import DataError
from slipway.system.files import sha256_bytes
from tests.data import raw_files
from tests.data.pictures import cleaned_by, data_params, picture, write_folder, write_parquet
from tests.project_params import clean_params


@pytest.fixture(name="data")
def _data(tmp_path: Path) -> DataParams:
    root = write_folder(
        tmp_path / "images", {"cat": [picture(0), picture(1)], "dog": [picture(2), picture(3)]}
    )
    lines = [
        f"{sha256_bytes(path.read_bytes())}  {path.relative_to(root).as_posix()}\n"
        for path in sorted(root.rglob("*.png"))
    ]
    (root / "SHA256SUMS").write_text("".join(lines))
    return data_params(root, checksums=str(root / "SHA256SUMS"))


def clean(data: DataParams) -> Cleaned:
    params = clean_params(rules=dict.fromkeys(("blurred", "near_duplicate"), None))
    listed = read_checksums(Path(str(data.checksums)), data)
    return cleaned_by(
        partial(read_samples, data, read_files=False), params, data.task, digests=listed
    )


def refused(cleaned: Cleaned) -> dict[str, str]:
    return {row["source"]: row["rule"] for row in cleaned.quarantine.to_pylist()}


def test_files_with_correct_checksums_are_kept_and_the_list_is_not_a_sample(
    data: DataParams,
) -> None:
    cleaned = clean(data)
    assert (cleaned.num_read, cleaned.rows.num_rows, refused(cleaned)) == (4, 4, {})


def test_clean_reports_altered_missing_and_unlisted_files(data: DataParams) -> None:
    root = Path(data.path)
    (root / "cat" / "0.png").write_bytes(picture(7))
    (root / "dog" / "0.png").unlink()
    (root / "dog" / "new.png").write_bytes(picture(8))
    cleaned = clean(data)
    assert refused(cleaned) == {
        "cat/0.png": "digest_mismatch",
        "dog/0.png": "missing_file",
        "dog/new.png": "not_listed",
    }
    assert cleaned.rows.num_rows + cleaned.quarantine.num_rows == cleaned.num_read == 5


def test_a_file_that_cannot_be_decoded_keeps_its_rule_and_says_that_it_was_altered(
    data: DataParams,
) -> None:
    (Path(data.path) / "cat" / "0.png").write_bytes(picture(0)[:-80])
    [row] = clean(data).quarantine.to_pylist()
    assert row["rule"] == "truncated"
    assert row["detail"].endswith("its SHA-256 is not the one in data.checksums, either")


def test_checksums_of_images_named_in_a_csv_are_checked_by_path(data: DataParams) -> None:
    root = Path(data.path)
    (root / "a.csv").write_text(
        "image,label\ncat/0.png,cat\ndog/0.png,dog\ncat/1.png,cat\ndog/1.png,dog\n"
    )
    (root / "cat" / "1.png").write_bytes(picture(9))
    listed = data.model_copy(update={"path": str(root / "a.csv")})
    assert refused(clean(listed)) == {"2:cat/1.png": "digest_mismatch"}


def test_the_checksum_of_a_table_is_checked_but_not_those_of_images_inside_it(
    tmp_path: Path,
) -> None:
    table = write_parquet(tmp_path / "a.parquet", [picture(0), picture(1)], ["cat", "dog"])
    (tmp_path / "sums").write_text(f"{sha256_bytes(table.read_bytes())}  a.parquet\n")
    data = data_params(table, checksums=str(tmp_path / "sums"))
    assert refused(clean(data)) == {}
    (tmp_path / "sums").write_text(f"{'0' * 64} *a.parquet\n")
    assert refused(clean(data)) == {"a.parquet": "digest_mismatch"}


ODD = [
    "new\nline.png",
    "carriage\r.png",
    "back\\slash.png",
    "separator\u2028\x0c.png",
    "bad\udcff.png",
]


def write_odd_names(root: Path) -> None:
    """Write pictures with names of all kinds, and the list that sha256sum makes of them."""
    for seed, name in enumerate(ODD):
        (root / "cat" / name).write_bytes(picture(20 + seed))
    files = [path.relative_to(root) for path in sorted(root.rglob("*.png"))]
    with (root / "SHA256SUMS").open("wb") as sums:
        subprocess.run(["sha256sum", "--", *files], cwd=root, stdout=sums, check=True)


def test_escaped_names_in_a_checksum_list_are_read(data: DataParams) -> None:
    root = Path(data.path)
    write_odd_names(root)
    assert (clean(data).rows.num_rows, refused(clean(data))) == (4 + len(ODD), {})


def test_checksums_of_files_with_escaped_names_are_checked(data: DataParams) -> None:
    """An altered file with such a name is detected, too."""
    root = Path(data.path)
    write_odd_names(root)
    for seed, name in enumerate(ODD):
        (root / "cat" / name).write_bytes(picture(30 + seed))
    assert list(refused(clean(data)).values()) == ["digest_mismatch"] * len(ODD)


def test_checksums_are_checked_in_a_class_whose_name_looks_like_a_row_number(
    data: DataParams,
) -> None:
    root, sums = Path(data.path), Path(str(data.checksums))
    (root / "cat").rename(root / "3:cat")
    sums.write_text(sums.read_text().replace("cat/", "3:cat/"))
    assert refused(clean(data)) == {}
    (root / "3:cat" / "0.png").write_bytes(picture(7))
    (root / "3:cat" / "new.png").write_bytes(picture(8))
    assert refused(clean(data)) == {"3:cat/0.png": "digest_mismatch", "3:cat/new.png": "not_listed"}


def test_a_checksum_list_written_on_windows_is_read(data: DataParams) -> None:
    sums = Path(str(data.checksums))
    sums.write_bytes(
        b"\xef\xbb\xbf" + sums.read_bytes().replace(b"  ", b" *").replace(b"\n", b"\r\n")
    )
    assert (clean(data).rows.num_rows, refused(clean(data))) == (4, {})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "it lists no file"),
        ("abc  a.png\n", "line 1: 'abc  a.png' is not 'SHA-256  path'"),
        (
            f"{'0' * 64}  a.png\n{'1' * 64}  a.png\n",
            "line 2: 'a.png' is listed before with another digest",
        ),
    ],
)
def test_a_malformed_checksum_list_is_refused(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "sums").write_text(content)
    with pytest.raises(DataError, match="sha256sum") as raised:
        read_checksums(tmp_path / "sums", data_params(tmp_path))
    assert words in str(raised.value)


def test_a_missing_checksum_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_checksums(tmp_path / "sums", data_params(tmp_path))


def test_the_checksum_of_a_table_file_is_checked(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("a,label\n1,x\n")
    listing = tmp_path / "SHA256SUMS"
    listing.write_text(f"{sha256_bytes(table.read_bytes())}  ./t.csv\n")
    for data_path in (table, tmp_path):
        read_checksums(listing, data_params(data_path)).check_table(table)
    table.write_text("a,label\n2,x\n")
    with pytest.raises(DataError, match="altered after it was listed"):
        read_checksums(listing, data_params(table)).check_table(table)
    listing.write_text(f"{sha256_bytes(table.read_bytes())}  u.csv\n")
    with pytest.raises(DataError, match=r"does not list 't.csv'"):
        read_checksums(listing, data_params(table)).check_table(table)


def test_checksums_of_joined_image_folders_and_tables_are_checked_by_path(
    data: DataParams,
) -> None:
    root = Path(data.path)
    folders = data.model_copy(update={"path": str(root.parent), "sources": ["images"]})
    listing = root / "SHA256SUMS"
    listing.write_text(listing.read_text().replace("  ", "  images/"))
    (root / "cat" / "1.png").write_bytes(picture(9))
    assert refused(clean(folders)) == {"images/cat/1.png": "digest_mismatch"}

    lines = "image,label\ncat/0.png,cat\ndog/0.png,dog\ncat/1.png,cat\ndog/1.png,dog\n"
    (root / "a+.csv").write_text(lines)
    tables = folders.model_copy(update={"sources": ["images/a+.csv"]})
    assert refused(clean(tables)) == {"2:images/a+.csv:cat/1.png": "digest_mismatch"}
    inside = tables.model_copy(update={"path": str(root), "sources": ["a+.csv"]})
    listing.write_text(listing.read_text().replace("  images/", "  "))
    assert refused(clean(inside)) == {"2:a+.csv:cat/1.png": "digest_mismatch"}


def test_the_checksum_of_each_joined_table_or_of_its_archive_is_checked(tmp_path: Path) -> None:
    for number, name in enumerate("ab"):
        (tmp_path / f"{name}.csv").write_text(f"a,b,target\n1,{number},x\n3,4,y\n")
    with zipfile.ZipFile(tmp_path / "c.zip", "w") as archive:
        archive.writestr("c.csv", "a,b,target\n5,6,x\n7,8,y\n")
    listing = tmp_path / "SHA256SUMS"
    files = [tmp_path / name for name in ("a.csv", "b.csv", "c.zip")]
    listing.write_text("".join(f"{sha256_bytes(p.read_bytes())}  {p.name}\n" for p in files))
    data = unpacked(
        raw_files.data_params(
            tmp_path,
            "table_classification",
            sources=[path.name for path in files],
            checksums=str(listing),
        ),
        ArchiveLimits(10, 200),
    )
    assert clean_rows(data, clean_params(max_bad_fraction=1.0)).cleaned.num_read == 6
    for path in files:
        before = listing.read_text()
        listing.write_text(before.replace(sha256_bytes(path.read_bytes()), "0" * 64, 1))
        with pytest.raises(DataError, match=r"was altered after it was listed"):
            clean_rows(data, clean_params())
        listing.write_text(before)
