"""Names in archives of Windows and of systems without UTF-8, and archives in archives."""

import io
import re
import tarfile
import zipfile
from pathlib import Path

import pytest

from slipway.data.sources.archives import (
    ArchiveLimits,
    archives_of,
    content_of,
    shown_as,
    unpack,
    unpacked,
)
from slipway.data.sources.sources import find_layout, read_samples
from slipway.project.inspection import inspect
from slipway.project.proposal import propose
from slipway.system.errors import DataError
from tests.data.pictures import data_params, picture
from tests.data.raw_files import data_params as table_params

LIMITS = ArchiveLimits(max_members=100, max_ratio=200)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def zip_of(path: Path, names: list[bytes], content: bytes | None = None) -> Path:
    """Write a zip whose names are exactly these bytes, without the flag of UTF-8."""
    with zipfile.ZipFile(path, "w") as archive:
        for number, name in enumerate(names):  # of the same length, and replaced below
            archive.writestr(_stand_in(number, name), content or picture(number))
    payload = path.read_bytes()
    for number, name in enumerate(names):
        payload = payload.replace(_stand_in(number, name).encode(), name)
    path.write_bytes(payload)
    return path


def _stand_in(number: int, name: bytes) -> str:
    return chr(ord("A") + number) * len(name)


WINDOWS = [b"Hund\\1.png", b"Hund\\2.png", b"Katze\\1.png", b"Katze\\2.png"]
JAPANESE = [
    f"{label}/{number}.png".encode("cp932") for label in ("犬猫", "表示") for number in (1, 2)
]


def labels(path: Path, **changes: object) -> list[str | None]:
    return [sample.label for sample in read_samples(unpacked(data_params(path, **changes), LIMITS))]


def test_backslashes_separate_folders_for_init_and_clean_alike(tmp_path: Path) -> None:
    path = zip_of(tmp_path / "in.zip", [*WINDOWS, b"leer\\"])
    assert dict(inspect(path).classes) == {"Hund": 2, "Katze": 2}
    assert labels(path) == ["Hund", "Hund", "Katze", "Katze"]


@pytest.mark.parametrize("name", [b"..\\x.png", b"a\\..\\..\\x.png", b"\\x.png", b"C:\\x.png"])
def test_a_path_with_backslashes_that_leads_out_is_refused_by_init_and_clean(
    tmp_path: Path, name: bytes
) -> None:
    path = zip_of(tmp_path / "in.zip", [*WINDOWS, name])
    with pytest.raises(DataError, match=r"leads out|absolute|drive letter"):
        inspect(path)
    with pytest.raises(DataError, match=r"leads out|absolute|drive letter"):
        labels(path)


def test_paths_that_differ_only_in_their_separators_are_one_file_and_refused(
    tmp_path: Path,
) -> None:
    path = zip_of(tmp_path / "in.zip", [*WINDOWS, b"Hund/1.png"])
    for read in (inspect, labels):
        with pytest.raises(DataError, match="there twice"):
            read(path)


def test_names_that_are_not_utf8_get_a_hint_with_the_encodings_in_which_they_read_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = zip_of(tmp_path / "in.zip", JAPANESE)
    (note,) = inspect(path).notes
    assert note.startswith("in.zip has names that are not UTF-8.")
    assert "set data.archive_encoding" in note
    assert "cp932 ('犬猫/1.png')" in note
    assert propose(inspect(path)).notes[0].startswith("4 rows")
    labels(path)
    assert capsys.readouterr().out == f"{note}\n"


def test_archive_encoding_gives_the_names_as_they_were_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = zip_of(tmp_path / "in.zip", JAPANESE)
    assert "犬猫" not in labels(path)
    capsys.readouterr()
    assert labels(path, archive_encoding="cp932") == ["犬猫", "犬猫", "表示", "表示"]
    assert capsys.readouterr().out == ""


def test_a_name_that_is_not_in_archive_encoding_is_refused(tmp_path: Path) -> None:
    path = zip_of(tmp_path / "in.zip", [b"a/\x81\xff.png", b"b/1.png"])
    with pytest.raises(DataError, match=r"its name is not cp932, which data\.archive_encoding say"):
        labels(path, archive_encoding="cp932")


def test_a_path_that_leads_out_only_in_archive_encoding_is_refused(tmp_path: Path) -> None:
    path = zip_of(tmp_path / "in.zip", ["../x\xe4.png".encode("cp500"), b"a/1.png"])
    with pytest.raises(DataError, match="leads out"):
        labels(path, archive_encoding="cp500")


def test_a_tar_with_names_of_another_encoding_is_read_by_archive_encoding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.tar"
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT, encoding="cp1252") as archive:
        for name in ("Kätzchen/1.png", "Hund/1.png"):
            member = tarfile.TarInfo(name)
            member.size = len(picture(1))
            archive.addfile(member, io.BytesIO(picture(1)))
    assert "cp1252 ('Kätzchen/1.png')" in inspect(path).notes[0]
    assert labels(path, archive_encoding="cp1252") == ["Hund", "Kätzchen"]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("ending", "command"), [(".zip", "unzip "), (".tar", "tar -xf ")])
@pytest.mark.parametrize("inner", ["data.zip", "deep/data.tar.gz", "table.xlsx"])
def test_an_archive_of_an_archive_is_refused_by_the_name_that_the_user_gave(
    tmp_path: Path, ending: str, command: str, inner: str
) -> None:
    path = tmp_path / f"in{ending}"
    if ending == ".zip":
        zip_of(path, [inner.encode()], b"PK")
    else:
        with tarfile.open(path, "w") as archive:
            archive.addfile(tarfile.TarInfo(inner))
    for read in (inspect, labels):
        with pytest.raises(DataError) as raised:
            read(path)
        assert f"the archive {str(path)!r} holds nothing but {inner!r}" in str(raised.value)
        assert f"{command}{path}" in str(raised.value)


def test_an_error_in_the_content_of_an_archive_names_the_archive(tmp_path: Path) -> None:
    path = zip_of(tmp_path / "in.zip", [b"a.csv", b"b.csv"], b"x,target\n1,2\n")
    other = zip_of(tmp_path / "other.zip", [b"a.csv", b"b.pq"], b"x,target\n1,2\n")
    data = table_params(Path("other.zip"))
    assert find_layout(unpacked(table_params(path), LIMITS)).tables
    plain = unpacked(data, LIMITS)
    assert archives_of(data) == {content_of(Path("other.zip"), data): Path("other.zip")}
    with pytest.raises(DataError) as raised, shown_as(archives_of(data)):
        find_layout(plain)
    assert "data.path 'other.zip' holds 2 tables (a.csv, b.pq)" in str(raised.value)
    assert re.search(r"\.work|tmp", str(raised.value)) is None
    assert other.is_file()


def test_archive_encoding_has_its_own_copy_and_none_of_the_other_is_reused(tmp_path: Path) -> None:
    path = zip_of(tmp_path / "in.zip", JAPANESE)
    folder = tmp_path / "copies"
    first = unpack(path, folder, LIMITS)
    second = unpack(path, folder, LIMITS, "cp932")
    assert first != second
    assert sorted(one.name for one in second.iterdir()) == ["犬猫", "表示"]
