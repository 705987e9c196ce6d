"""The label queue: logged rows that people should label next, and the labels that they gave.

The queue contains ids and labels; the inputs stay in the request log. A part of the rows is drawn
at random from all logged rows without a label. Their labels estimate the model's quality, as labels
that callers send do.

The other rows are drawn with a probability that grows with the gain expected from their label. The
rows with the largest gains are not simply taken, because they are often nearly the same. These rows
are harder than the usual traffic, so their labels are marked: they are used for training but not to
estimate quality.
"""

import json
import math
import random
import sqlite3
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from slipway.system import files
from slipway.traffic.request_log import RequestRows, has_row
from slipway.traffic.selection import Content, Key, LoggedItem

QUEUE = "label_queue.sqlite"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS chosen (
    request_id TEXT NOT NULL,
    item INTEGER NOT NULL,
    time REAL NOT NULL, -- of the answer, seconds since 1970
    by_gain INTEGER NOT NULL, -- 0: drawn at random
    place INTEGER NOT NULL, -- in the order of the queue
    PRIMARY KEY (request_id, item)
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS opinions (
    request_id TEXT NOT NULL,
    item INTEGER NOT NULL,
    labeller TEXT NOT NULL,
    truth TEXT, -- JSON; null: skipped
    time REAL NOT NULL,
    PRIMARY KEY (request_id, item, labeller)
) STRICT, WITHOUT ROWID;
"""
_MOST_ALIKE = 0.8  # Jaccard index; rows that are more similar count as near copies
_CHARACTERS = 5  # length of the pieces into which a text is divided
_LONG_TEXT = 40  # characters; shorter texts are compared as a whole
_CANDIDATES = 20  # rows that are compared for each row that is chosen
_SHARPNESS = 4.0  # a row with half of another's gain is drawn 16 times less often
_SIDE = 8  # an image is compared by a pattern of 8 x 8 pixels


@dataclass(frozen=True)
class QueuedRow:
    """A row that the label queue asks a person to label."""

    request_id: str
    item: int  # position in the request, from 0
    time: float  # time of the answer, seconds since 1970
    by_gain: bool  # False: drawn at random

    @property
    def key(self) -> Key:
        return self.request_id, self.item, self.time


class LabelQueue:
    """The queue in an SQLite file, which several processes may use at once.

    With `opinions` = 1 the first label decides. Otherwise more than half of so many people must
    give the same label.
    """

    def __init__(self, path: Path, opinions: int = 1) -> None:
        self._path, self._opinions = path, opinions
        files.make_private_directory(path.parent)
        if not path.exists():
            path.touch(files.PRIVATE)
        with self._transaction() as connection:
            connection.executescript(_SCHEMA)

    def add(self, rows: Sequence[QueuedRow]) -> int:
        """Append the rows that are not in the queue yet; return the number of appended rows."""
        with self._transaction() as connection:
            (last,) = connection.execute("SELECT coalesce(max(place), 0) FROM chosen").fetchone()
            return sum(
                connection.execute(
                    "INSERT OR IGNORE INTO chosen VALUES (?, ?, ?, ?, ?)",
                    (*row.key, row.by_gain, last + number),
                ).rowcount
                for number, row in enumerate(rows, start=1)
            )

    def rows(self) -> list[QueuedRow]:
        """Return all rows in the order of the queue."""
        with self._transaction() as connection:
            found = connection.execute(
                "SELECT request_id, item, time, by_gain FROM chosen ORDER BY place"
            ).fetchall()
        return [QueuedRow(name, item, moment, bool(mark)) for name, item, moment, mark in found]

    def waiting(self, labeller: str) -> list[QueuedRow]:
        """Return the undecided rows that this labeller has neither labelled nor skipped."""
        opinions = self._all_opinions()
        found = ((row, opinions.get(row.key[:2], {})) for row in self.rows())
        return [row for row, own in found if labeller not in own and self._is_open(own)]

    def conflicts(self) -> list[tuple[QueuedRow, dict[str, Any]]]:
        """Return the rows without a majority, each with the labels by labeller."""
        return [
            (row, {name: json.loads(one) for name, one in given.items()})
            for row, given in self._labelled()
            if len(set(given.values())) > 1 and self._decided(given) is None
        ]

    def decided(self) -> list[tuple[QueuedRow, Any, str]]:
        """Return (row, label, labeller) of each decided row; the last labeller who gave it."""
        found = []
        for row, given in self._labelled():
            if (text := self._decided(given)) is not None:
                name = [labeller for labeller, truth in given.items() if truth == text][-1]
                found.append((row, json.loads(text), name))
        return found

    def _labelled(self) -> Iterator[tuple[QueuedRow, dict[str, str]]]:
        """Yield each row with its labels by labeller."""
        opinions = self._all_opinions()
        for row in self.rows():
            yield row, _given(opinions.get(row.key[:2], {}))

    def give(self, row: QueuedRow, labeller: str, truth: Any) -> Any:
        """Store the label that `labeller` gave, or None to skip the row.

        Return the decided label or None.
        """
        text = None if truth is None else json.dumps(truth, sort_keys=True)
        with self._transaction() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO opinions VALUES (?, ?, ?, ?, ?)",
                (*row.key[:2], labeller, text, time.time()),
            )
        return self._label(row)

    def undo(self, labeller: str) -> tuple[QueuedRow, Any] | None:
        """Remove a labeller's last opinion.

        Returns the row and its decided label (None: undecided now); None if there was no opinion.
        """
        with self._transaction() as connection:
            last = connection.execute(
                "SELECT request_id, item FROM opinions JOIN chosen USING (request_id, item) "
                "WHERE labeller = ? ORDER BY opinions.time DESC LIMIT 1",
                (labeller,),
            ).fetchone()
            if last is None:
                return None
            connection.execute(
                "DELETE FROM opinions WHERE request_id = ? AND item = ? AND labeller = ?",
                (*last, labeller),
            )
        row = next(row for row in self.rows() if row.key[:2] == last)
        return row, self._label(row)

    def remove(self, rows: RequestRows) -> int:
        """Remove rows of requests and their opinions; return the number of rows."""
        own = [row.key[:2] for row in self.rows() if has_row(rows, *row.key[:2])]
        with self._transaction() as connection:
            connection.execute("PRAGMA secure_delete = ON").fetchall()
            for table in ("opinions", "chosen"):
                connection.executemany(
                    f"DELETE FROM {table} WHERE request_id = ? AND item = ?", own
                )
        return len(own)

    def _label(self, row: QueuedRow) -> Any:
        decided = self._decided(_given(self._all_opinions().get(row.key[:2], {})))
        return None if decided is None else json.loads(decided)

    def _is_open(self, opinions: dict[str, str | None]) -> bool:
        """Return True if a row needs another label; a disagreement allows one more than usual."""
        given = _given(opinions)
        return self._decided(given) is None and len(given) <= self._opinions

    def _decided(self, given: dict[str, str]) -> str | None:
        needed = 1 if self._opinions == 1 else self._opinions // 2 + 1
        best = Counter(given.values()).most_common(1)
        return best[0][0] if best and best[0][1] >= needed else None

    def _all_opinions(self) -> dict[tuple[str, int], dict[str, str | None]]:
        found: dict[tuple[str, int], dict[str, str | None]] = {}
        with self._transaction() as connection:
            for request_id, item, labeller, truth in connection.execute(
                "SELECT request_id, item, labeller, truth FROM opinions ORDER BY time"
            ):
                found.setdefault((request_id, item), {})[labeller] = truth
        return found

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        connection = sqlite3.connect(self._path, timeout=30)
        try:
            with connection:
                yield connection
        finally:
            connection.close()


def choose(
    items: Sequence[LoggedItem],
    read: Callable[[set[Key]], dict[Key, Content]],
    num_rows: int,
    random_fraction: float,
    seed: int | None = None,
) -> list[QueuedRow]:
    """Choose rows to label: some at random, the others drawn by expected gain, without near copies.

    Args:
        items: logged rows without a label; no two have the same content.
        read: returns the contents of the rows with the given keys.
        num_rows: number of rows to choose.
        random_fraction: fraction of `num_rows` to draw at random, from 0 to 1.
        seed: seed of both draws and of the order; None for a new one each time.

    Returns:
        At most `num_rows` rows in random order.
    """
    generator = random.Random(seed)
    num_random = min(len(items), round(num_rows * random_fraction))
    drawn = generator.sample(range(len(items)), num_random)
    # The largest sums of log-weight and Gumbel noise are a draw without replacement by weight.
    order = [
        _SHARPNESS * math.log(max(one, 1e-12)) - math.log(-math.log(1 - generator.random()))
        for one in gains(items)
    ]
    rest = sorted(set(range(len(items))) - set(drawn), key=lambda place: -order[place])
    wanted = num_rows - num_random
    candidates = [items[place] for place in rest[: wanted * _CANDIDATES]]
    # Near copies of the drawn rows are left out, too, because they teach little.
    contents = read({item.key for item in candidates} | {items[place].key for place in drawn})
    pieces = {key: _pieces(content) for key, content in contents.items()}
    rows = [QueuedRow(*items[place].key, by_gain=False) for place in drawn]
    asked = [pieces[row.key] for row in rows if row.key in pieces]
    for item in candidates:
        if wanted and item.key in pieces and not _is_copy(pieces[item.key], asked):
            wanted -= 1
            asked.append(pieces[item.key])
            rows.append(QueuedRow(*item.key, by_gain=True))
    generator.shuffle(rows)  # labellers must not see which rows were drawn at random
    return rows


def gains(items: Sequence[LoggedItem]) -> list[float]:
    """Return the expected gain (0 to 1) of a label for each row: how ambiguous its prediction is.

    Predicted numbers have no probabilities. Their gain is the fraction of rows whose OOD score is
    not larger.
    """
    scores = sorted(item.ood_score for item in items)
    return [
        bisect_right(scores, item.ood_score) / len(items)
        if item.ambiguity is None
        else item.ambiguity
        for item in items
    ]


def _given(opinions: dict[str, str | None]) -> dict[str, str]:
    return {labeller: truth for labeller, truth in opinions.items() if truth is not None}


def _is_copy(own: frozenset[Any], others: Sequence[frozenset[Any]]) -> bool:
    return any(len(own & other) > _MOST_ALIKE * len(own | other) for other in others)


def _pieces(content: Content) -> frozenset[Any]:
    """Return the parts by which rows are compared: cells, pieces of texts or image gradients."""
    if isinstance(content, bytes):
        with Image.open(BytesIO(content)) as image:
            small = image.convert("L").resize((_SIDE + 1, _SIDE))
        pixels = small.tobytes()
        rows = [pixels[begin : begin + _SIDE + 1] for begin in range(0, len(pixels), _SIDE + 1)]
        return frozenset(
            (y, x, row[x] < row[x + 1]) for y, row in enumerate(rows) for x in range(_SIDE)
        )
    found: set[Any] = set()
    for name, cell in content.items():
        if isinstance(cell, str) and len(cell) >= _LONG_TEXT:
            text = " ".join(cell.lower().split())
            found |= {(name, text[place : place + _CHARACTERS]) for place in range(len(text))}
        else:
            found.add((name, f"{cell:.3g}" if isinstance(cell, float) else cell))
    return frozenset(found)
