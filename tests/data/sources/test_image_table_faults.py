"""Damaged tables of images, and columns that do not fit, are refused or named."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipway.data.sources.formats.json_lines import NOT_AN_OBJECT
from slipway.data.sources.samples import Fault
from slipway.system.errors import DataError
from tests.data.pictures import picture, write_parquet
from tests.data.sources.source_cases import read


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_error_names_each_missing_column_with_the_closest_match(
    tmp_path: Path, ending: str
) -> None:
    table = pa.table({"picture": ["a"], "labels": ["b"]})
    if ending == "csv":
        (tmp_path / "a.csv").write_text("picture,labels\na,b\n")
    else:
        pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError) as raised:
        read(tmp_path / f"a.{ending}", group_column="person")
    text = str(raised.value)
    assert "has the columns picture, labels" in text
    assert "data.target_column is 'label', which is not there; did you mean 'labels'?" in text
    assert "data.image_column is 'image'" in text
    assert "data.group_column is 'person'" in text


@pytest.mark.parametrize("before", ["", "sep=;\n", "# made by a, b\r\n\r\n"])
def test_a_csv_of_images_may_begin_with_a_separator_or_comments(
    tmp_path: Path, before: str
) -> None:
    (tmp_path / "a.csv").write_text(f"{before}image;label\na;b\n")
    assert [(sample.source, sample.label) for sample in read(tmp_path / "a.csv")] == [("0:a", "b")]


def test_an_error_in_a_csv_after_comments_names_the_line_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('# a\n# b\nimage,label\na,"b"c\n')
    with pytest.raises(DataError, match="near line 5"):
        read(tmp_path / "a.csv")


def test_a_duplicate_column_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("image,label,label\na,b,c\n")
    with pytest.raises(DataError, match="'label' 2 times"):
        read(tmp_path / "a.csv")


def test_an_image_column_of_numbers_is_refused_with_its_type(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": [1], "label": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="has the type int64, expected encoded image bytes"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize("content", [b"", b"PAR1", b"not parquet at all" * 10])
def test_a_file_that_is_not_parquet_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(DataError, match="not a readable Parquet file"):
        read(tmp_path / "a.parquet")


def test_a_damaged_parquet_file_is_a_data_error_or_reads_as_before(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", [picture(seed) for seed in range(30)], ["x"] * 30)
    good = path.read_bytes()
    outcomes = set()
    for position in range(0, len(good), len(good) // 150):
        path.write_bytes(good[:position] + bytes([good[position] ^ 0x55]) + good[position + 1 :])
        try:
            outcomes.add(f"{len(read(path))} rows")
        except DataError:
            outcomes.add("refused")
    assert outcomes <= {"30 rows", "refused"}
    assert "refused" in outcomes


@pytest.mark.parametrize("content", [b'image,label\n"a,b\n', b"image,label\n\xff\xfe,b\n"])
def test_a_damaged_csv_is_a_data_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(DataError, match="not a readable CSV"):
        read(tmp_path / "a.csv")


def test_a_table_of_images_in_another_encoding_is_read_or_refused_with_a_remedy(
    tmp_path: Path,
) -> None:
    (tmp_path / "Köln.png").write_bytes(picture(1))
    path = tmp_path / "a.csv"
    path.write_bytes("image,label\nKöln.png,Größe\n".encode("windows-1252"))
    (sample,) = read(path, encoding="windows-1252")
    assert (sample.label, sample.payload) == ("Größe", picture(1))
    with pytest.raises(DataError, match=r"Expected utf-8 .* set data\.encoding to windows-1252"):
        read(path)


def test_a_csv_of_images_in_another_encoding_than_declared_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("image,label\n1.png,café\n")
    with pytest.raises(DataError, match=r"Set data\.encoding to utf-8"):
        read(path, encoding="windows-1252")
    path.write_text("image,label\n1.png,café\n", encoding="utf-16")
    with pytest.raises(DataError, match=r"set data\.encoding to utf-16"):
        read(path)
    assert [sample.label for sample in read(path, encoding="utf-16")] == ["café"]


def test_a_json_line_that_is_not_utf8_is_malformed(tmp_path: Path) -> None:
    lines = '{"image": "1.png", "label": "café"}\n'
    (tmp_path / "a.jsonl").write_bytes(lines.encode() + lines.encode("windows-1252"))
    first, second = read(tmp_path / "a.jsonl")
    assert first.label == "café"
    assert second.label is None
    assert second.fault == Fault("malformed_row", NOT_AN_OBJECT)


def test_a_missing_column_of_an_image_table_names_the_comments_above_the_header(
    tmp_path: Path,
) -> None:
    table = tmp_path / "t.csv"
    table.write_text("#image;label\na,b\n1.png,cat\n")
    with pytest.raises(DataError, match=r"skipped as comments: '#image;label'. Remove the #"):
        read(table)
