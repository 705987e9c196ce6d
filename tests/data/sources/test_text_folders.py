"""Tests of class folders of text files: rows, splits, and files that are not text."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from slipway.config.sections import DataParams
from slipway.data.rules.report import CleanResult
from slipway.data.sources import sources, text_folders
from slipway.data.sources.archives import ArchiveLimits, unpacked
from slipway.data.sources.text_format import USUAL_FORMAT
from slipway.data.texts.cleaning import check_texts, clean_texts
from slipway.data.texts.source import raw_rows
from slipway.inputs.texts import TextContract
from slipway.system.errors import DataError
from tests.project_params import PROJECT, clean_params
from tests.sentences import sentences

pytestmark = pytest.mark.unit


def of_folder(path: Path, **changes: Any) -> DataParams:
    own = {"path": str(path), "task": "text_classification", "text_columns": ["text"]}
    return PROJECT.data.model_copy(update=own | changes)


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def write_classes(folder: Path, num_rows: int = 12, seed: int = 1) -> None:
    for number, (name, text) in enumerate(sentences(num_rows, seed)):
        write(folder / name / f"{number}.txt", text)


def cleaned(folder: Path, **changes: Any) -> CleanResult:
    return clean_texts(sources.with_given_split(of_folder(folder, **changes))[0], clean_params())


def rows_of(found: CleanResult) -> dict[str, dict[str, Any]]:
    """Return the kept rows, by file."""
    rows = found.cleaned.rows.to_pylist()
    return {row["source"].partition(":")[2]: row for row in rows}


def refused(found: CleanResult) -> dict[str, tuple[str, str]]:
    rows = found.cleaned.quarantine.to_pylist()
    return {row["source"].partition(":")[2]: (row["rule"], row["detail"]) for row in rows}


def test_each_text_file_is_a_row_with_the_class_of_its_folder(tmp_path: Path) -> None:
    write_classes(tmp_path)
    write(tmp_path / "food" / "deeper" / "a.txt", "a plate of rice")
    write(tmp_path / "food" / ".hidden", "no sample")
    found = rows_of(cleaned(tmp_path))
    assert found["food/deeper/a.txt"]["label"] == "food"
    assert {name.partition("/")[0] for name in found} == {"food", "travel"}
    assert len(found) == 13


def test_an_archive_of_text_class_folders_is_cleaned_like_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where it is unpacked
    write_classes(tmp_path / "texts")
    packed = of_folder(Path(shutil.make_archive("packed", "zip", tmp_path / "texts")))
    data = sources.with_given_split(unpacked(packed, ArchiveLimits(100, 200)))[0]
    found = clean_texts(data, clean_params()).cleaned.rows
    assert found.equals(cleaned(tmp_path / "texts").cleaned.rows)


def test_another_file_elsewhere_moves_no_row_and_changes_no_id(tmp_path: Path) -> None:
    write_classes(tmp_path)
    before = {name: row["id"] for name, row in rows_of(cleaned(tmp_path)).items()}
    write(tmp_path / "apart" / "0.txt", "one more class")
    after = {name: row["id"] for name, row in rows_of(cleaned(tmp_path)).items()}
    assert {name: after[name] for name in before} == before


def test_files_that_are_not_text_are_refused_with_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_folders, "MAX_FILE_BYTES", 1000)
    write_classes(tmp_path)
    write(tmp_path / "food/big.txt", "much " * 300)
    write(tmp_path / "food/picture.png", b"\x89PNG\r\n\x1a\n" + b"rice" * 9 + b"\0")
    write(tmp_path / "food/wide.txt", "\ufeffrice".encode("utf-16-le"))
    write(tmp_path / "food/latin.txt", "cr\xe8me".encode("latin-1"))
    write(tmp_path / "food/empty.txt", " \n")
    write(tmp_path / "lost.txt", "of no class")
    (tmp_path / "food/gone.txt").symlink_to(tmp_path / "food/nowhere.txt")
    (tmp_path / "food/other.txt").symlink_to("/etc/hostname")
    found = refused(cleaned(tmp_path))
    assert {name: rule for name, (rule, _) in found.items()} == {
        "food/big.txt": "malformed_row",
        "food/picture.png": "malformed_row",
        "food/wide.txt": "malformed_row",
        "food/latin.txt": "type_violation",
        "food/empty.txt": "missing_value",
        "food/gone.txt": "malformed_row",
        "food/other.txt": "malformed_row",
        "lost.txt": "malformed_row",
    }
    assert "has 1,500 bytes, expected a text of at most 1,000" in found["food/big.txt"][1]
    assert "has NUL bytes" in found["food/picture.png"][1]
    assert "set data.encoding to utf-16" in found["food/wide.txt"][1]
    assert "> utf8.txt" in found["food/wide.txt"][1]
    assert "does not exist" in found["food/gone.txt"][1]
    assert "which is not below" in found["food/other.txt"][1]
    assert "beside the class folders" in found["lost.txt"][1]


def test_text_files_are_read_in_the_encoding_that_the_params_name(tmp_path: Path) -> None:
    for name, text in sentences(12, seed=1):
        write(tmp_path / name / f"{hash(text)}.txt", text.encode("gb18030"))
    found = cleaned(tmp_path, encoding="gb18030")
    assert found.cleaned.rows.num_rows == 12
    assert not found.cleaned.flagged.num_rows


def test_split_folders_give_the_split_and_the_test_copy_of_equal_texts_is_kept(
    tmp_path: Path,
) -> None:
    write_classes(tmp_path / "train", 12, seed=1)
    write_classes(tmp_path / "test", 6, seed=2)
    copy = (tmp_path / "train/food/0.txt").read_text()
    write(tmp_path / "test/food/copy.txt", copy)
    data, layout = sources.with_given_split(of_folder(tmp_path))
    found = clean_texts(data, clean_params())
    rows = rows_of(found)
    assert rows["test/food/copy.txt"]["given_split"] == "test"
    assert rows["train/travel/1.txt"]["given_split"] == "train"
    rule, detail = refused(found)["train/food/0.txt"]
    assert rule == "exact_duplicate"
    assert "test/food/copy.txt, which is in the given split test" in detail
    assert "test/ -> test (7 rows)" in layout.described(found.cleaned.rows, USUAL_FORMAT)


def test_pooled_split_folders_of_texts_give_classes_but_no_split(tmp_path: Path) -> None:
    write_classes(tmp_path / "train")
    write_classes(tmp_path / "test", 6, seed=2)
    rows = rows_of(cleaned(tmp_path, split_folders="pool"))
    assert {row["given_split"] for row in rows.values()} == {None}
    assert {row["label"] for row in rows.values()} == {"food", "travel"}


def test_rows_of_joined_text_folders_name_their_source_and_file(tmp_path: Path) -> None:
    write_classes(tmp_path / "a", 6, seed=1)
    write_classes(tmp_path / "b", 6, seed=2)
    found = cleaned(tmp_path, sources=["a", "b"])
    assert {"a/food/0.txt", "b/food/0.txt"} <= set(rows_of(found))


def test_spellings_of_a_class_in_text_folders_become_one_class(tmp_path: Path) -> None:
    write_classes(tmp_path)
    write(tmp_path / "Food" / "x.txt", "more rice")
    row = rows_of(cleaned(tmp_path, label_map={"Food": "food"}))["Food/x.txt"]
    assert (row["label"], row["corrections"]) == ("food", ["label: Food -> food"])


def test_raw_rows_of_a_folder_have_the_sources_and_ids_of_the_cleaned_rows(tmp_path: Path) -> None:
    write_classes(tmp_path, 4)
    rows = cleaned(tmp_path).cleaned.rows.to_pylist()
    contract = TextContract(kind="texts", columns=["text"], max_bytes=64, max_characters=None)
    found = list(raw_rows(of_folder(tmp_path), contract, {row["source"] for row in rows}))
    assert {(source, row_id) for source, row_id, _ in found} == {
        (row["source"], row["id"]) for row in rows
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_columns": ["a", "b"]}, "is a folder of text files, one text each"),
        ({"task": "text_multilabel"}, "gives each text one label"),
        ({"task": "text_regression"}, "whose sub-folders are classes"),
        ({"group_column": "author"}, "data.group_column is 'author', which is not there"),
    ],
)
def test_a_text_folder_refuses_params_that_only_tables_have(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_classes(tmp_path)
    with pytest.raises(DataError, match=message):
        check_texts(of_folder(tmp_path, **changes))


def test_error_of_a_checksum_names_the_altered_text_file(tmp_path: Path) -> None:
    write_classes(tmp_path / "data", 4)
    listed = tmp_path / "sums.txt"
    lines = [f"{'0' * 64}  {p.relative_to(tmp_path / 'data')}" for p in tmp_path.rglob("*.txt")]
    listed.write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"food/0\.txt' was altered after it was listed"):
        cleaned(tmp_path / "data", checksums=str(listed))
