"""The journal of a search survives kills and damages: intact lines stay, damaged ones are named."""

from pathlib import Path

import pytest

from slipway.search.journal import JobLine, Journal, StudyLine
from slipway.system.errors import SchemaError

STUDY = StudyLine(
    event="study", format_version=1, name="search-1", identity="ab", threads=2, epochs=4
)


def job(number: int) -> JobLine:
    return JobLine(event="job", job=number, trial=number, values={"seed": number}, level=0, epoch=4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    journal = Journal(tmp_path / "search-1/journal.jsonl")
    for line in (STUDY, job(0), job(1)):
        journal.append(line)
    return journal.path


def test_journal_lines_survive_a_round_trip_through_the_file(path: Path) -> None:
    journal = Journal(path).read()
    assert journal.lines == [STUDY, job(0), job(1)]
    assert journal.damages == []


def test_line_truncated_by_a_kill_is_reported_and_the_next_one_is_whole(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])
    journal = Journal(path).read()
    assert journal.lines == [STUDY, job(0)]
    assert "line 3" in journal.damages[0]
    assert path.with_suffix(".damaged").exists()
    journal.append(job(1))
    again = Journal(path).read()
    assert again.lines == [STUDY, job(0), job(1)]
    assert again.damages == []


def test_flipped_byte_in_the_journal_loses_only_its_line(path: Path) -> None:
    payload = path.read_bytes()
    for place in range(0, len(payload), 7):
        flipped = bytearray(payload)
        flipped[place] ^= 1
        path.write_bytes(flipped)
        found = Journal(path).read()
        assert len(found.lines) >= 1
        assert all(line in (STUDY, job(0), job(1)) for line in found.lines)
        assert len(found.lines) == 3 or found.damages


def test_a_journal_without_its_first_line_is_refused_by_its_path(path: Path) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[1:]))
    with pytest.raises(SchemaError, match=r"search-1.*remove"):
        _ = Journal(path).read().study
