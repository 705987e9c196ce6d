"""The journal: appended, chained, and readable after a kill at any byte."""

from pathlib import Path

import pytest

from slipway.loop.journal import JOURNAL, LoopError, append_step, cycles, read_journal


def three_steps(tmp_path: Path) -> Path:
    path = tmp_path / JOURNAL
    append_step(path, 1, "triggered", {"reasons": ["drift"]}, 1.0)
    append_step(path, 1, "ended", {"outcome": "no_gain"}, 2.0)
    append_step(path, 2, "triggered", {"reasons": ["labels"]}, 3.0)
    return path


def test_steps_are_grouped_by_cycle(tmp_path: Path) -> None:
    first, second = cycles(read_journal(three_steps(tmp_path)))
    assert not first.is_open
    assert second.is_open
    assert second.detail("triggered") == {"reasons": ["labels"]}


def test_a_truncated_last_line_is_replaced_by_the_next_step(tmp_path: Path) -> None:
    path = three_steps(tmp_path)
    whole = path.read_bytes()
    begin = whole[:-1].rindex(b"\n") + 1
    for end in range(begin, len(whole)):
        path.write_bytes(whole[:end])
        assert len(read_journal(path)) == 2
        append_step(path, 2, "triggered", {"reasons": ["labels"]}, 3.0)
        assert path.read_bytes() == whole


def test_a_journal_with_any_changed_byte_is_refused(tmp_path: Path) -> None:
    path = three_steps(tmp_path)
    whole = path.read_bytes()
    last = whole[:-1].rindex(b"\n") + 1
    for place in range(0, last, 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(LoopError, match="was changed or damaged"):
            read_journal(path)


def test_a_journal_with_a_removed_line_is_refused(tmp_path: Path) -> None:
    path = three_steps(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[2])
    with pytest.raises(LoopError, match="line 2"):
        read_journal(path)
