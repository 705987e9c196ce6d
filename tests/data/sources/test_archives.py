"""Tests of archives: they are unpacked once and completely, or refused with all bad members."""

import gzip
import io
import random
import re
import resource
import shutil
import stat
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from slipway.data.sources import archives
from slipway.data.sources.archive_members import Member
from slipway.data.sources.archives import ArchiveLimits, name_problem, unpack, unpacked
from slipway.data.sources.sources import read_samples
from slipway.system.errors import DataError, UnavailableError
from tests.data.pictures import data_params, picture, write_folder

LIMITS = ArchiveLimits(max_members=100, max_ratio=200)
ENDINGS = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
EVERY_KIND = pytest.mark.parametrize("ending", ENDINGS)
FOLDER = {
    f"{label}/{number}.png": picture(10 * ord(label) + number)
    for label in "ab"
    for number in range(3)
}


def pack(path: Path, members: list[tuple[str, bytes]]) -> Path:
    """Write an archive of files that have exactly these names, in this order."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in members:
                info = zipfile.ZipInfo(name)
                info.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(info, content)
        return path
    mode = {".tar": "w", ".bz2": "w:bz2", ".xz": "w:xz"}.get(path.suffix, "w:gz")
    with tarfile.open(str(path), mode) as archive:  # type: ignore[call-overload]
        for name, content in members:
            tarinfo = tarfile.TarInfo(name)
            tarinfo.size = len(content)
            archive.addfile(tarinfo, io.BytesIO(content))
    return path


def tar_of(path: Path, *members: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo("a/fine.png"))
        for member in members:
            archive.addfile(member)
    return path


def tar_member(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


def zip_with(path: Path, name: str, change: Callable[[zipfile.ZipInfo], None]) -> Path:
    info = zipfile.ZipInfo(name)
    change(info)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/fine.png", b"fine")
        archive.writestr(info, b"/etc/passwd")
    return path


def everything(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(name="guarded")
def _guarded(tmp_path: Path) -> Iterator[Path]:
    """Yield the folder for unpacking; then check that no file is outside and no link anywhere."""
    (tmp_path / "inside").mkdir()
    yield tmp_path / "inside" / "archives"
    assert intruders(tmp_path) == []


def intruders(root: Path) -> list[str]:
    """Return files outside of `inside/archives`, and links and special files anywhere."""
    found = [
        path
        for path in root.iterdir()
        if path.name not in {"inside", *(f"in{ending}" for ending in ENDINGS)}
    ]
    found += [path for path in (root / "inside").iterdir() if path.name != "archives"]
    found += [
        path
        for path in root.rglob("*")
        if path.is_symlink() or not (path.is_file() or path.is_dir())
    ]
    found += [path for path in root.rglob("*") if path.is_file() and path.stat().st_nlink > 1]
    return sorted({path.relative_to(root).as_posix() for path in found})


def test_the_check_for_files_outside_the_folder_detects_an_unsafe_unpacking(tmp_path: Path) -> None:
    """Control of all tests with `guarded`: the same archive is unpacked without checks."""
    (tmp_path / "inside" / "archives").mkdir(parents=True)
    path = tar_of(
        tmp_path / "in.tar",
        tar_member("a/link", tarfile.SYMTYPE, "/etc/passwd"),
        tarfile.TarInfo("../evil"),
    )
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path / "inside" / "archives", filter="fully_trusted")
    assert intruders(tmp_path) == ["inside/archives/a/link", "inside/evil"]


def refusal(path: Path, folder: Path, limits: ArchiveLimits = LIMITS) -> str:
    with pytest.raises(DataError) as raised:
        unpack(path, folder, limits)
    assert not [entry for entry in folder.glob("*") if entry.name != "refused.txt"], (
        "something was left behind"
    )
    return str(raised.value)


# what is unpacked


@EVERY_KIND
def test_an_archive_of_a_folder_gives_the_same_samples_as_the_folder(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = pack(tmp_path / f"in{ending}", list(FOLDER.items()))
    plain = write_folder(
        tmp_path / "plain",
        {label: [FOLDER[f"{label}/{number}.png"] for number in range(3)] for label in "ab"},
    )
    found = list(read_samples(unpacked(data_params(path), LIMITS)))
    assert found == list(read_samples(data_params(plain)))
    assert len(found) == 6


@EVERY_KIND
def test_a_single_top_folder_is_skipped_and_macos_files_are_not_a_class(
    guarded: Path, ending: str
) -> None:
    members = [
        *((f"photos/{name}", content) for name, content in FOLDER.items()),
        ("__MACOSX/photos/a/._1.png", b"x"),
        (".DS_Store", b"x"),
    ]
    folder = unpack(pack(guarded.parents[1] / f"in{ending}", members), guarded, LIMITS)
    assert everything(folder) == FOLDER


@EVERY_KIND
def test_an_archive_of_a_table_with_its_images_is_read(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    members = [("./table.csv", b"image,label\nimages/1.png,cat\n"), ("./images/1.png", picture(1))]
    [sample] = read_samples(unpacked(data_params(pack(tmp_path / f"in{ending}", members)), LIMITS))
    assert (sample.source, sample.label, sample.payload) == ("0:images/1.png", "cat", picture(1))


def test_unpacked_returns_params_unchanged_if_the_data_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "folder.zip").mkdir()
    for name in ("folder.zip", "missing.zip", "table.csv"):
        data = data_params(tmp_path / name)
        assert unpacked(data, LIMITS) is data


@EVERY_KIND
def test_unpacking_again_reuses_the_folder_unless_it_is_damaged(guarded: Path, ending: str) -> None:
    path = pack(guarded.parents[1] / f"in{ending}", list(FOLDER.items()))
    first = unpack(path, guarded, LIMITS)
    stamp = (first / "a/1.png").stat().st_ino
    assert unpack(path, guarded, LIMITS) == first
    assert (first / "a/1.png").stat().st_ino == stamp
    (first / "b/2.png").unlink()
    assert everything(unpack(path, guarded, LIMITS)) == FOLDER


def test_an_archive_inside_an_archive_is_an_ordinary_file(guarded: Path) -> None:
    inner = pack(guarded.parents[1] / "in.zip", [("../evil", b"x")]).read_bytes()
    folder = unpack(
        pack(guarded.parents[1] / "in.tar", [("a/1.zip", inner), ("b/2.png", b"x")]),
        guarded,
        LIMITS,
    )
    assert everything(folder)["a/1.zip"] == inner


def test_a_backslash_in_a_zip_from_windows_separates_folders(guarded: Path) -> None:
    folder = unpack(
        pack(guarded.parents[1] / "in.zip", [("a\\1.png", b"x"), ("b\\2.png", b"y")]),
        guarded,
        LIMITS,
    )
    assert everything(folder) == {"a/1.png": b"x", "b/2.png": b"y"}


def test_utf8_names_in_a_zip_without_the_flag_are_recognized(guarded: Path) -> None:
    path = guarded.parents[1] / "in.zip"
    content = bytearray(pack(path, [("Kätzchen/1.png", b"x"), ("猫/2.png", b"y")]).read_bytes())
    for start, flags in ((b"PK\3\4", 7), (b"PK\1\2", 9)):  # local headers, table of contents
        for found in re.finditer(re.escape(start), bytes(content)):
            content[found.start() + flags] &= ~0x08
    path.write_bytes(content)
    with zipfile.ZipFile(path) as archive:
        assert "Kätzchen/1.png" not in archive.namelist()
    assert everything(unpack(path, guarded, LIMITS)) == {"Kätzchen/1.png": b"x", "猫/2.png": b"y"}


def test_a_member_with_a_name_that_is_not_utf8_is_unpacked(guarded: Path) -> None:
    path = guarded.parents[1] / "in.tar"
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT, encoding="latin-1") as archive:
        archive.addfile(tarfile.TarInfo("a/\xfc.png"))
        archive.addfile(tarfile.TarInfo("b/1.png"))
    assert len(everything(unpack(path, guarded, LIMITS))) == 2


# names


BAD_NAMES = {
    "../evil": "leads out",
    "a/../../evil": "leads out",
    "a/..": "leads out",
    "..\\evil": "leads out",
    "/tmp/evil": "absolute",
    "//server/share": "absolute",
    "\\windows\\evil": "absolute",
    "C:\\evil": "drive letter",
    "c:evil": "drive letter",
    f"a/{'x' * 256}": "more than 255 bytes",
    "a/" * 513: "a path of more than 1024",
}


@pytest.mark.parametrize(("name", "problem"), BAD_NAMES.items(), ids=range(len(BAD_NAMES)))
def test_name_problem_finds_names_that_are_unsafe_on_some_system(name: str, problem: str) -> None:
    assert problem in str(name_problem(name))


@pytest.mark.parametrize(
    "name", ["a/1.png", "./a/1.png", "a..b/..c", "a//b", "ä/ö.png", "a/" + "x" * 255, ""]
)
def test_name_problem_accepts_ordinary_names(name: str) -> None:
    assert name_problem(name) is None


@EVERY_KIND
def test_one_error_names_every_bad_member_of_an_archive(guarded: Path, ending: str) -> None:
    members = [("a/1.png", b"x"), *((name, b"evil") for name in BAD_NAMES), ("b/1.png", b"x")]
    text = refusal(pack(guarded.parents[1] / f"in{ending}", members), guarded)
    assert f"has {len(BAD_NAMES)} members that may not be unpacked" in text
    listed = (guarded / "refused.txt").read_text().splitlines()
    assert len(listed) == len(BAD_NAMES)
    assert all(problem in line for line, problem in zip(listed, BAD_NAMES.values(), strict=True))


@EVERY_KIND
@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["a/1.png", "a/1.PNG"], "'a/1.PNG': differs from 'a/1.png' only in case"),
        (["Cat/1.png", "cat/2.png"], "its folder differs from 'Cat' only in case"),
        (["a/\u00fc.png", "a/u\u0308.png"], r"differs from 'a/\\xfc.png' only in case or Unicode"),
        (["a/stra\u00dfe.png", "a/STRASSE.png"], "only in case or Unicode"),
        (["a/1.png", "a/1.png"], "'a/1.png': there twice"),
        (["a/1.png", "./a//1.png"], "there twice"),
        (["a/b", "a/b/1.png"], "needs the folder 'a/b', where 'a/b' is a file"),
        (["a/b/1.png", "a/b"], "a file where 'a/b' is a folder"),
    ],
)
def test_members_with_names_that_collide_on_some_file_system_are_refused(
    guarded: Path, ending: str, names: list[str], problem: str
) -> None:
    with (
        pytest.warns(UserWarning, match="Duplicate name")
        if ending == ".zip" and names[0] == names[1]
        else nullcontext()
    ):
        path = pack(guarded.parents[1] / f"in{ending}", [(name, b"x") for name in names])
    assert problem.replace("\\\\", "\\") in refusal(path, guarded)


# kinds


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (tarfile.SYMTYPE, "a symbolic link to '/etc/passwd'"),
        (tarfile.LNKTYPE, "a hard link to '/etc/passwd'"),
        (tarfile.CHRTYPE, "a device, pipe"),
        (tarfile.BLKTYPE, "a device, pipe"),
        (tarfile.FIFOTYPE, "a device, pipe"),
        (b"V", "a device, pipe or another special file"),
    ],
)
def test_links_and_devices_in_a_tar_are_refused(guarded: Path, kind: bytes, problem: str) -> None:
    path = tar_of(
        guarded.parents[1] / "in.tar",
        tar_member("a/evil", kind, "/etc/passwd"),
        tar_member("b/evil", kind, "/etc/passwd"),
    )
    text = refusal(path, guarded)
    assert "has 2 members" in text
    assert f"'a/evil': {problem}" in text


def test_a_file_through_a_link_of_the_same_archive_is_never_written(guarded: Path) -> None:
    outside = guarded.parents[1]
    through = tarfile.TarInfo("door/evil")
    text = refusal(
        tar_of(outside / "in.tar", tar_member("door", tarfile.SYMTYPE, str(outside)), through),
        guarded,
    )
    assert "'door': a symbolic link" in text


@pytest.mark.parametrize(
    ("mode", "problem"),
    [
        (stat.S_IFLNK, "a symbolic link"),
        (stat.S_IFCHR, "a device"),
        (stat.S_IFIFO, "a device"),
        (stat.S_IFSOCK, "a device"),
    ],
)
def test_links_and_devices_in_a_zip_are_refused(guarded: Path, mode: int, problem: str) -> None:
    path = zip_with(
        guarded.parents[1] / "in.zip",
        "a/evil",
        lambda info: setattr(info, "external_attr", (mode | 0o777) << 16),
    )
    assert f"'a/evil': {problem}" in refusal(path, guarded)


def patched(path: Path, signature: bytes, offset: int, value: int) -> Path:
    """Set the 16-bit number at `offset` of the last record with `signature` to `value`."""
    content = bytearray(path.read_bytes())
    place = content.rfind(signature) + offset
    content[place : place + 2] = value.to_bytes(2, "little")
    path.write_bytes(content)
    return path


def test_an_archive_with_an_encrypted_member_is_refused(guarded: Path) -> None:
    path = patched(
        pack(guarded.parents[1] / "in.zip", [("a/1", b"x"), ("b/2", b"y")]), b"PK\x01\x02", 8, 1
    )
    assert "'b/2': encrypted" in refusal(path, guarded)


def test_an_archive_with_an_unknown_compression_is_refused(guarded: Path) -> None:
    path = patched(
        pack(guarded.parents[1] / "in.zip", [("a/1", b"x"), ("b/2", b"y")]), b"PK\x01\x02", 10, 97
    )
    assert "'b/2': compressed by method 97" in refusal(path, guarded)


# size


@EVERY_KIND
def test_an_archive_may_have_exactly_the_maximum_number_of_members(
    guarded: Path, ending: str
) -> None:
    path = pack(guarded.parents[1] / f"in{ending}", [(f"a/{number}", b"x") for number in range(10)])
    assert "more than 9 members, which clean.max_archive_members" in refusal(
        path, guarded, ArchiveLimits(9, 1000)
    )
    assert len(everything(unpack(path, guarded, ArchiveLimits(10, 1000)))) == 10


@pytest.mark.process
@pytest.mark.parametrize("ending", [".zip", ".tar.gz", ".tar.bz2", ".tar.xz"])
def test_an_archive_that_expands_a_thousandfold_is_refused(guarded: Path, ending: str) -> None:
    path = pack(guarded.parents[1] / f"in{ending}", [("a/bomb", bytes(50 << 20))])
    assert (50 << 20) / path.stat().st_size > 900
    assert "which clean.max_archive_ratio does not allow" in refusal(path, guarded)
    assert everything(unpack(path, guarded, ArchiveLimits(100, 10**6))) == {"bomb": bytes(50 << 20)}


def test_a_zip_whose_headers_lie_about_its_size_is_refused(guarded: Path) -> None:
    """The zip's directory declares 1 KiB, but the bytes of its stream are counted."""
    path = pack(guarded.parents[1] / "in.zip", [("a/bomb", bytes(50 << 20))])
    content = path.read_bytes()
    path.write_bytes(
        content.replace((50 << 20).to_bytes(4, "little"), (1024).to_bytes(4, "little"))
    )
    assert "'a/bomb': damaged" in refusal(path, guarded)


def test_a_sparse_tar_that_expands_too_much_is_refused(guarded: Path) -> None:
    """A few bytes stand for a gigabyte of zeros, which is no compressed stream."""
    member = tarfile.TarInfo("a/holes")
    member.pax_headers = {
        "GNU.sparse.map": "0,0",
        "GNU.sparse.size": str(1 << 30),
        "GNU.sparse.name": "a/holes",
    }
    path = guarded.parents[1] / "in.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(member)
    assert path.stat().st_size == 10240
    assert "clean.max_archive_ratio does not allow" in refusal(path, guarded)


def test_a_tar_header_of_a_gigabyte_is_not_read_into_memory(guarded: Path) -> None:
    header = tarfile.TarInfo("long")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 1 << 30
    path = guarded.parents[1] / "in.tar"
    path.write_bytes(header.tobuf() + bytes(10240))
    assert "a header of 1073741824 bytes" in refusal(path, guarded)


@pytest.mark.parametrize("num_bytes", [100, 5_000, 2 << 20])
def test_a_disk_that_fills_up_is_not_reported_as_a_damaged_archive(
    num_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(_path: Path, _mode: str, **_arguments: object) -> io.BufferedIOBase:
        return Path("/dev/full").open("wb")

    member = Member("a.png", False, num_bytes, None, lambda: io.BytesIO(bytes(num_bytes)))
    monkeypatch.setattr(archives, "open", full_disk, raising=False)
    with pytest.raises(UnavailableError, match="Free space there"):
        archives._copy(member, tmp_path / "a.png", num_bytes)


def test_an_archive_too_large_for_the_disk_is_refused_before_anything_is_written(
    guarded: Path,
) -> None:
    entry = bytearray(zip_entry("a/0000000"))
    entry[24:28] = (0xFFFFFFFE).to_bytes(4, "little")  # 4 GiB each, 20 TB in all
    table = b"".join(bytes(entry[:46]) + f"a/{number:07}".encode() for number in range(5000))
    path = guarded.parents[1] / "in.zip"
    path.write_bytes(table + zip_end(5000, len(table)))
    with pytest.raises(UnavailableError, match=r"unpacks to 20,480,000 MiB, .* MiB free"):
        unpack(path, guarded, ArchiveLimits(5000, 10**9))
    assert not list(guarded.iterdir())


@pytest.mark.process
@pytest.mark.parametrize(
    "ending", [".zip", ".tar", pytest.param(".tar.gz", marks=pytest.mark.nightly)]
)
def test_an_archive_of_a_million_members_is_refused_quickly_and_in_little_memory(
    guarded: Path, ending: str, is_nightly: bool
) -> None:
    path = million(guarded.parents[1] / f"in{ending}")
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    assert "more than 100000 members" in refusal(path, guarded, ArchiveLimits(100_000, 10**6))
    assert not is_nightly or time.perf_counter() - start < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB


def million(path: Path) -> Path:
    """Write a million empty files to an archive, faster than zipfile and tarfile do."""
    if path.suffix == ".zip":
        entry = bytearray(zip_entry("a/0000000"))
        table = b"".join(
            bytes(entry[:46]) + f"a/{number:07}".encode() for number in range(1_000_000)
        )
        path.write_bytes(table + zip_end(1_000_000, len(table)))
        return path
    header = tarfile.TarInfo("a/0000000").tobuf(tarfile.USTAR_FORMAT)
    plain = path if path.suffix == ".tar" else path.with_suffix("")
    with plain.open("wb") as file:
        for number in range(1_000_000):
            name = f"a/{number:07}".encode()
            change = sum(name) - sum(header[:9])
            checksum = f"{int(header[148:154], 8) + change:06o}".encode()
            file.write(name + header[9:148] + checksum + header[154:])
        file.write(bytes(1024))
    if plain != path:
        with plain.open("rb") as source, gzip.open(path, "wb", 1) as sink:
            shutil.copyfileobj(source, sink)
        plain.unlink()
    return path


def zip_end(num_members: int, num_bytes: int) -> bytes:
    """Return the end of a zip64 file whose directory is at its beginning."""
    end = (
        b"PK\x06\x06"
        + (44).to_bytes(8, "little")
        + bytes(12)
        + num_members.to_bytes(8, "little") * 2
    )
    end += num_bytes.to_bytes(8, "little") + bytes(8)
    locator = b"PK\x06\x07" + bytes(4) + num_bytes.to_bytes(8, "little") + (1).to_bytes(4, "little")
    return end + locator + b"PK\x05\x06" + bytes(4) + b"\xff" * 12 + bytes(2)


def zip_entry(name: str) -> bytes:
    """Return the entry of an empty member in a zip's directory."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, b"")
    content = buffer.getvalue()
    return content[content.find(b"PK\x01\x02") :]


# damage


@EVERY_KIND
def test_a_truncated_archive_of_every_kind_is_refused(guarded: Path, ending: str) -> None:
    path = pack(guarded.parents[1] / f"in{ending}", list(FOLDER.items()))
    whole = path.read_bytes()
    end = (
        len(whole.rstrip(b"\0")) if ending == ".tar" else len(whole)
    )  # a tar ends in padding, of which two blocks are needed
    for size in [0, 10, 511, 512, 1024, end // 3, end // 2, end - 1]:
        path.write_bytes(whole[:size])
        assert "damaged" in refusal(path, guarded), size


def test_error_names_a_damaged_member_of_a_zip(guarded: Path) -> None:
    path = pack(guarded.parents[1] / "in.zip", list(FOLDER.items()))
    content = bytearray(path.read_bytes())
    content[content.find(b"b/1.png") + 40] ^= 0xFF
    path.write_bytes(content)
    text = refusal(path, guarded)
    assert "has 1 member that" in text
    assert "'b/1.png': damaged" in text


def test_a_damaged_header_in_the_middle_of_a_tar_is_not_taken_for_its_end(guarded: Path) -> None:
    path = pack(guarded.parents[1] / "in.tar", list(FOLDER.items()))
    content = bytearray(path.read_bytes())
    content[content.find(b"b/0.png") + 150] ^= 0xFF
    path.write_bytes(content)
    assert "no end marker" in refusal(path, guarded)


def test_data_after_the_end_of_a_tar_is_refused(guarded: Path) -> None:
    path = pack(guarded.parents[1] / "in.tar", list(FOLDER.items()))
    path.write_bytes(path.read_bytes() * 2)
    assert "data after its end marker" in refusal(path, guarded)


@EVERY_KIND
def test_an_empty_archive_is_refused(guarded: Path, ending: str) -> None:
    assert "holds no files" in refusal(
        pack(guarded.parents[1] / f"in{ending}", []), guarded, ArchiveLimits(10, 10**6)
    )


@pytest.mark.parametrize(
    ("ending", "packed_as", "looks"),
    [
        (".tar", ".tar.gz", "a gzip archive"),
        (".tar.gz", ".tar", "a tar archive"),
        (".zip", ".tar", "a tar archive"),
        (".tar.gz", ".tar.xz", "an xz archive"),
        (".tar.xz", ".tar.bz2", "a bzip2 archive"),
        (".tar.bz2", ".zip", "a ZIP archive"),
        (".tar", ".zip", "a ZIP archive"),
    ],
)
def test_error_for_an_archive_with_a_wrong_ending_names_its_real_format(
    guarded: Path, ending: str, packed_as: str, looks: str
) -> None:
    path = pack(guarded.parents[1] / f"in{packed_as}", list(FOLDER.items())).rename(
        guarded.parents[1] / f"in{ending}"
    )
    text = refusal(path, guarded)
    assert f"It looks like {looks}" in text
    assert "give it the ending of what it is" in text


@pytest.mark.process
@EVERY_KIND
def test_an_archive_with_flipped_bits_is_refused_or_unpacked_whole(
    guarded: Path, ending: str
) -> None:
    path = pack(guarded.parents[1] / f"in{ending}", list(FOLDER.items()))
    whole, generator = path.read_bytes(), random.Random(7)
    outcomes: dict[str, int] = {"whole": 0, "refused": 0}
    for _ in range(300):
        content = bytearray(whole)
        content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        path.write_bytes(content)
        try:
            found: dict[str, Any] = everything(unpack(path, guarded, LIMITS))
        except DataError:
            outcomes["refused"] += 1
            continue
        outcomes["whole"] += 1
        assert len(found) == len(FOLDER)
    assert outcomes["refused"] > 50
