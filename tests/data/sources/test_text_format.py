from pathlib import Path

import pytest

from slipway.data.sources.raw_tables import column_names, read_raw_table
from slipway.data.sources.text_format import TextFormat, as_utf8, utf8_blocks
from slipway.system.errors import DataError
from tests.data.raw_files import write_csv

TEXT = "Straße,Preis\nMünchen,€ 5\n"


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "windows-1252", "utf-16", "utf-16-le", "utf-32"]
)
def test_a_table_is_read_in_the_encoding_that_the_params_name(
    tmp_path: Path, encoding: str
) -> None:
    path = write_csv(tmp_path / "t.csv", TEXT.encode(encoding))
    table = read_raw_table(path, written=TextFormat(encoding))
    assert column_names(path, TextFormat(encoding)) == list(table.columns) == ["Straße", "Preis"]
    assert table.columns["Straße"].values.to_pylist() == ["München"]
    assert table.columns["Preis"].values.to_pylist() == ["€ 5"]


@pytest.mark.parametrize(
    ("encoding", "named"),
    [
        ("utf-16", "utf-16"),
        ("utf-32", "utf-32"),
        ("utf-16-le", "utf-16-le"),
        ("utf-16-be", "utf-16-be"),
    ],
)
def test_a_utf16_or_utf32_file_is_refused_with_the_name_of_its_encoding(
    tmp_path: Path, encoding: str, named: str
) -> None:
    path = write_csv(tmp_path / "my t.csv", "a,b\n1,2\n".encode(encoding))
    with pytest.raises(DataError, match=f"data.encoding to {named}, or convert it: iconv") as error:
        read_raw_table(path)
    assert f"'{path}' > utf8.csv" in str(error.value)


def test_a_header_in_another_encoding_is_refused_with_a_remedy(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", TEXT.encode("latin-1", "replace"))
    with pytest.raises(
        DataError, match=r"header that is not UTF-8: .* set data\.encoding to windows-1252"
    ):
        read_raw_table(path)


def test_a_utf8_file_is_refused_if_the_params_name_another_encoding(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is UTF-8\. Set data\.encoding to utf-8"):
        as_utf8(tmp_path / "t.csv", TEXT.encode(), "latin-1")
    assert as_utf8(tmp_path / "t.csv", b"a,b\n", "latin-1") == b"a,b\n"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "windows-1252", "utf-16", "utf-32"])
@pytest.mark.parametrize("size", [1, 3, 1 << 10])
def test_a_character_may_be_split_between_two_blocks_of_a_file(
    tmp_path: Path, encoding: str, size: int
) -> None:
    payload = TEXT.encode(encoding) + b"\xff\xfe"
    named = "utf-8" if encoding == "utf-8-sig" else encoding
    blocks = (payload[begin : begin + size] for begin in range(0, len(payload), size))
    found = b"".join(utf8_blocks(tmp_path / "t.csv", blocks, named))
    assert found.decode() == payload.decode(encoding, errors="replace")


def test_utf8_content_read_in_blocks_is_refused_if_the_params_name_another_encoding(
    tmp_path: Path,
) -> None:
    blocks = [bytes([byte]) for byte in TEXT.encode()]
    with pytest.raises(DataError, match=r"is UTF-8\. Set data\.encoding to utf-8"):
        list(utf8_blocks(tmp_path / "t.csv", blocks, "latin-1"))
