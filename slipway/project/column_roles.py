"""Guesses the roles of a table's columns: target candidates, group, time, weight, given split."""

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from slipway.config.sections import DataParams, default_of
from slipway.data.engine.label_sets import read_labels
from slipway.data.engine.rows import SPLITS
from slipway.data.rules.class_names import joined_counts
from slipway.data.sources.raw_tables import RawColumn
from slipway.data.tables.cells import BAD, GOOD, is_missing, typed_column
from slipway.data.tables.column_types import ColumnGuess, infer
from slipway.data.tables.targets import label_of
from slipway.kinds.targets import CLASS, LABELS, NUMBER, TargetKind

_TARGET_NAMES = (
    *("target", "label", "labels", "class", "class_name", "class_label", "label_name", "y"),
    *("outcome", "ground_truth", "class_id", "label_id", "response"),
)
_SPLIT_NAMES = ("split", "subset", "partition", "set", "fold", "usage")
_WEIGHT_NAMES = ("sample_weight", "instance_weight", "row_weight")
_PERSONS = "patient|subject|participant|speaker|person"
_GROUPED = (
    f"{_PERSONS}|user|customer|client|student|household|family|session|visit|device|machine|sensor|"
    "store|site|hospital|group|account|owner|author|plot|scene|video|track"
)
_GROUP_NAME = re.compile(
    rf"(.*_)?({_GROUPED})s?_?(id|no|nr|number|name|key|code)|(.*_)?({_PERSONS})s?|groups?"
)
_BIRTH = re.compile(r"birth|dob\b|born")
_MIN_ROWS_PER_GROUP = 1.2
_MIN_GROUPS = 8
_MIN_DATES = 10
_TIMES = "years?|yr|dates?|months?|weeks?|days?|hours?|time|period|quarter|wave|round|visit|age"
_TIME_NAME = re.compile(rf"(.*_)?({_TIMES})(_.*)?")
_LONG_AGO, _FAR_AHEAD = 1700, 2200  # years between which consecutive whole numbers are years
_FEWEST_TIMES, _FEWEST_IN_PANEL = 3, 3
_PANEL_FILLED = 0.5  # least fraction of the pairs of a group and a time that have a row
_MANY_GROUPS = 20  # enough to test a model on groups that it has not seen
_MOST_CLASSES = 20  # most classes of a column of whole numbers
# Between the labels of a cell, the usual one first.
_SEPARATORS: tuple[str, ...] = (default_of(DataParams, "label_separator"), ";", ",", "/")
_MOSTLY, _SOMETIMES = 0.9, 0.1  # fractions of the rows
_ROWS_PER_CLASS = 8  # average rows; with fewer a column holds no classes
_FREE_TEXT_CHARACTERS = 25  # average length from which a column holds free text
_WIDE = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")  # scripts of short texts
_LETTER = re.compile(r"[^\W\d_]")
_LETTERS = re.compile(r"[^\W\d_]{2,}")  # a word, not the numbers of a date or a code


@dataclass(frozen=True)
class SampledColumn:
    """A column of the sample, with the inferred kind of its cells."""

    raw: RawColumn
    guess: ColumnGuess

    @property
    def name(self) -> str:
        """The name of the column, as the data file has it."""
        return self.raw.name

    @cached_property
    def plain_name(self) -> str:
        """The name in lower case with underscores, such as "patient_id" for "Patient ID"."""
        words = re.sub(r"([a-z])([A-Z])", r"\1_\2", self.name)
        return re.sub(r"[^a-z0-9]+", "_", words.casefold()).strip("_")

    @property
    def is_named_target(self) -> bool:
        """True if the name is a usual one of a target, such as "label"."""
        return self.plain_name in _TARGET_NAMES

    @cached_property
    def counts(self) -> Counter[str]:
        """The number of rows with each value, without missing values."""
        missing = is_missing(self.raw)
        number = np.bincount(self.raw.codes + 1, minlength=len(missing) + 1)[1:]
        texts = self.raw.values.to_pylist()
        found: Counter[str] = Counter()
        for text, lacks, rows in zip(texts, missing, number.tolist(), strict=True):
            if not lacks and rows:
                found[label_of(text)] += rows
        return found

    @cached_property
    def classes(self) -> Counter[str]:
        """The number of rows with each value, with the spellings of one value joined."""
        return joined_counts(self.counts)

    @property
    def missing_fraction(self) -> float:
        """The fraction of the rows without a value."""
        return 1 - self.counts.total() / max(1, len(self.raw.codes))

    @cached_property
    def numbers(self) -> NDArray[np.float64]:
        """The values of the rows that hold a number, (M,) float64."""
        typed = typed_column(self.raw, "number")
        return np.asarray(typed.cells[typed.cell_states == GOOD], np.float64)

    @property
    def is_numeric(self) -> bool:
        """True if nearly all cells are numbers, and not ids that float64 cannot tell apart."""
        return self.guess.kind != "category" and len(self.numbers) >= 0.95 * max(
            1, self.counts.total()
        )

    @property
    def has_whole_numbers(self) -> bool:
        """True if all numbers are whole."""
        return self.is_numeric and bool((self.numbers == np.floor(self.numbers)).all())

    @property
    def is_free_text(self) -> bool:
        """True if the column holds sentences: long texts that nearly all differ."""
        if self.raw.stored != "text" or self.is_numeric or not self.counts:
            return False
        if len(self.counts) < 0.3 * self.rows:
            return False
        texts = list(self.counts)[:1000]
        wide = sum(len(_WIDE.findall(text)) for text in texts)
        letters = sum(map(len, texts)) + 3 * wide  # a wide character says as much as some letters
        has_spaces = sum(text.count(" ") >= 2 for text in texts) + wide
        return letters / len(texts) >= _FREE_TEXT_CHARACTERS and has_spaces > len(texts) / 2

    @property
    def is_short_text(self) -> bool:
        """True if no table can use the column, and most of its texts have several words."""
        texts = list(self.counts)[:1000] if self.guess.kind == "ignore" else []
        several = sum(
            len(_LETTERS.findall(text)) > 1 or len(_WIDE.findall(text)) > 3  # more than a name
            for text in texts
        )
        return self.raw.stored == "text" and not self.is_numeric and several > len(texts) / 2

    @property
    def rows(self) -> int:
        """The number of sampled rows that have a value."""
        return self.counts.total()

    @property
    def may_be_classes(self) -> bool:
        """True if the values are few enough to be classes."""
        few = len(self.counts) <= max(2, self.rows / _ROWS_PER_CLASS)
        return len(self.counts) >= 2 and few and not self.is_free_text

    @cached_property
    def holds_lists(self) -> bool:
        """True if nearly all cells are JSON lists of labels."""
        if self.raw.stored != "text" or not self.counts:
            return False
        lists = sum(
            rows
            for text, rows in self.counts.items()
            if text.startswith("[") and text.endswith("]")
        )
        return lists >= _MOSTLY * self.rows

    @cached_property
    def separator(self) -> str:
        """The mark between the labels of a cell, if the cells are sets of labels."""
        sure = [mark for mark in _SEPARATORS if self._holds_sets(mark)]
        likely = [mark for mark in _SEPARATORS if self._divided_by(mark) >= _SOMETIMES]
        return (*sure, *likely, *_SEPARATORS)[0]

    @property
    def may_be_labels(self) -> bool:
        """True if cells are lists, or a separator gives many combinations of few labels."""
        return self.holds_lists or self._holds_sets(self.separator)

    def _divided_by(self, mark: str) -> float:
        """Return the fraction of the rows that have the mark."""
        divided = sum(rows for text, rows in self.counts.items() if mark in text)
        return divided / max(1, self.rows)

    def _holds_sets(self, mark: str) -> bool:
        if self.raw.stored != "text" or self.is_numeric or self._divided_by(mark) < _SOMETIMES:
            return False
        labels = self._labels(mark)
        # 3/4 is a fraction or a date, and 3,4 a number. But 3;4 and 3|4 may be codes of labels.
        may_be_names = mark in ";|" or any(map(_LETTER.search, labels))
        has_few = len(labels) * _ROWS_PER_CLASS <= self.rows
        return may_be_names and has_few and len(self.counts) > len(labels)

    def _labels(self, mark: str) -> Counter[str]:
        found: Counter[str] = Counter()
        for text, rows in self.counts.items():
            with contextlib.suppress(ValueError):
                for label in set(read_labels(text, mark)):
                    found[label] += rows
        return found

    @cached_property
    def label_counts(self) -> Counter[str]:
        """The number of rows with each label, for cells that are sets of labels."""
        return self._labels(self.separator)

    @property
    def may_be_label(self) -> bool:
        """True if all cells are true or false, as in a column for one label."""
        typed = typed_column(self.raw, "boolean")
        return bool((typed.cell_states == GOOD).any() and (typed.cell_states != BAD).all())

    @property
    def may_be_target(self) -> bool:
        """True if a model could predict this column."""
        if self.may_be_labels:
            return len(self.label_counts) >= 2
        if len(self.counts) < 2 or self.guess.kind == "date" or self.raw.stored == "other":
            return False
        return self.may_be_classes or (self.is_numeric and self.guess.kind != "ignore")


def sampled_columns(sample: Iterable[RawColumn]) -> list[SampledColumn]:
    """Return the sampled columns with their inferred kinds."""
    columns = [SampledColumn(raw, infer(raw)) for raw in sample]
    return [_not_an_input(column) if column.holds_lists else column for column in columns]


def _not_an_input(column: SampledColumn) -> SampledColumn:
    guess = replace(column.guess, kind="ignore", reason="it holds lists")
    return replace(column, guess=guess)


@dataclass(frozen=True)
class Panel:
    """A column such as Country, each of whose values has at most one row per value of a time."""

    group: SampledColumn
    time: SampledColumn

    @property
    def usual(self) -> SampledColumn:
        """The column by which the rows are split unless the user wants the other one."""
        has_many_groups = len(self.group.counts) >= _MANY_GROUPS
        is_short = len(self.time.counts) < _MIN_DATES
        by_group = self.time.guess.kind != "date" and (has_many_groups or is_short)
        return self.group if by_group else self.time


@dataclass(frozen=True)
class Roles:
    """Columns with a role besides input, such as group or time, and candidates for the target.

    `dates` are all columns of dates; `time` is the one that orders the rows, if it is clear.
    """

    targets: Sequence[SampledColumn]
    group: SampledColumn | None
    time: SampledColumn | None
    weight: SampledColumn | None
    split: SampledColumn | None
    dates: Sequence[SampledColumn]
    panel: Panel | None = None  # of which `group` or `time` is one column

    @property
    def special(self) -> list[SampledColumn]:
        """The columns with a role other than input or target."""
        roles = (self.group, self.time, self.weight, self.split)
        return [column for column in roles if column is not None]

    @property
    def named_target(self) -> SampledColumn | None:
        """The candidate that is named like a target. Of an id and its text, it is the text."""
        named = [column for column in self.targets if column.is_named_target]
        if len(named) == 2 and len(named[0].counts) == len(named[1].counts):
            texts = [column for column in named if not column.is_numeric]
            named = texts or named
        return named[0] if len(named) == 1 else None


def find_roles(
    columns: Sequence[SampledColumn], target: str | None, split_by: str | None = None
) -> Roles:
    """Return the role of each column except `target`, which the user named.

    `split_by` is the column of a panel that the user chose, or any other text for none of them.
    """
    others = [column for column in columns if column.name != target]
    split = _first(others, lambda c: c.plain_name in _SPLIT_NAMES and _names_splits(c))
    weight = _first(others, lambda c: c.plain_name in _WEIGHT_NAMES and c.is_numeric)
    group = _first(others, _is_group)
    dates = [c for c in others if c.guess.kind == "date" and not _BIRTH.search(c.plain_name)]
    dates = [c for c in dates if len(c.counts) >= _MIN_DATES]
    time = dates[0] if len(dates) == 1 and dates[0].missing_fraction < 0.01 else None
    panel = _find_panel([column for column in others if column not in (split, weight)])
    if panel is not None:  # both together would remove most rows: each group is on both sides
        chosen = panel.usual.name if split_by is None else split_by
        group = panel.group if chosen == panel.group.name else None
        time = panel.time if chosen == panel.time.name else None
    taken = {c.name for c in (split, weight, group, time) if c is not None}
    targets = [c for c in columns if c.name not in taken and c.may_be_target]
    return Roles(targets, group, time, weight, split, dates, panel)


def _find_panel(columns: Sequence[SampledColumn]) -> Panel | None:
    times = [column for column in columns if _is_time(column)]
    groups = [column for column in columns if column not in times and _may_be_group(column)]
    # A name such as Utah is clearer than its number.
    groups.sort(key=lambda column: column.is_numeric)
    panels = (Panel(group, time) for time in times for group in groups)
    return next((panel for panel in panels if _is_panel(panel)), None)


def _is_time(column: SampledColumn) -> bool:
    if _BIRTH.search(column.plain_name) or len(column.counts) < _FEWEST_TIMES:
        return False
    if column.guess.kind == "date":
        return True
    if not column.has_whole_numbers:
        return False
    values = np.unique(column.numbers)
    are_years = values[0] >= _LONG_AGO and values[-1] <= _FAR_AHEAD
    has_time_name = _TIME_NAME.fullmatch(column.plain_name) is not None
    return has_time_name or (are_years and bool((np.diff(values) == 1).all()))


def _may_be_group(column: SampledColumn) -> bool:
    if column.raw.stored not in ("text", "number") or column.guess.kind in ("date", "boolean"):
        return False
    return not column.is_numeric or column.has_whole_numbers


def _is_panel(panel: Panel) -> bool:
    """Return True if most pairs of a group and a time have a row, and none has two."""
    group, time = panel.group.raw.codes, panel.time.raw.codes
    present = (group >= 0) & (time >= 0)
    pairs = group[present] * (time.max(initial=0) + 1) + time[present]
    num_groups, num_times = len(np.unique(group[present])), len(np.unique(time[present]))
    return (
        num_groups >= _FEWEST_IN_PANEL
        and num_times >= _FEWEST_TIMES
        and present.mean() > _MOSTLY
        and len(np.unique(pairs)) == len(pairs) >= _PANEL_FILLED * num_groups * num_times
    )


def _first(
    columns: Iterable[SampledColumn], fits: Callable[[SampledColumn], bool]
) -> SampledColumn | None:
    return next((column for column in columns if fits(column)), None)


def _names_splits(column: SampledColumn) -> bool:
    found = {name.lower() for name in column.counts}
    return "train" in found and found <= set(SPLITS) and len(found) > 1


def _is_group(column: SampledColumn) -> bool:
    if _GROUP_NAME.fullmatch(column.plain_name) is None or column.guess.kind == "date":
        return False
    is_label = column.is_numeric and not column.has_whole_numbers
    repeats = column.rows / max(1, len(column.counts))
    return not is_label and len(column.counts) >= _MIN_GROUPS and repeats >= _MIN_ROWS_PER_GROUP


def target_kinds(column: SampledColumn) -> list[TargetKind]:
    """Return the kinds of target that a column's values suit: one, or both in cases of doubt."""
    if column.may_be_labels:
        return [LABELS] if column.holds_lists else [LABELS, CLASS]
    if not column.is_numeric or column.raw.stored == "boolean":
        return [CLASS]
    if not column.has_whole_numbers:
        return [NUMBER]
    if len(column.classes) == 2:
        return [CLASS]
    says_class = re.search(r"class|label|category|species|type|digit", column.plain_name)
    if says_class and column.may_be_classes:
        return [CLASS]
    if len(column.classes) > _MOST_CLASSES or not column.may_be_classes:
        return [NUMBER]
    values = sorted(map(float, column.classes))
    is_code = values == [float(n) for n in range(int(values[0]), int(values[0]) + len(values))]
    if is_code and values[0] in (0, 1) and column.plain_name in _TARGET_NAMES:
        return [CLASS]
    return [CLASS, NUMBER]
