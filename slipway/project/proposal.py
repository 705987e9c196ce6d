"""Proposes the params of a project, each with its reason, from what `inspect` found in the data."""

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from slipway.config.network_arguments import TabmArguments, require_network
from slipway.config.params import Params, parse_params, value_at
from slipway.config.sections import SplitParams, default_of
from slipway.config.training import TrainParams
from slipway.config.yaml_text import as_plain_yaml
from slipway.data.rules.class_names import (
    joined_counts,
    listed_variants,
    variants,
)
from slipway.data.sources.text_format import POINT, NumberMarks
from slipway.data.tables.cells import typed_column
from slipway.data.tables.column_types import ColumnGuess, counts_rows, marks_of
from slipway.data.tables.hints import written_as
from slipway.data.tables.notation import NO_NUMBERS, FoundMarks
from slipway.kinds.inputs import ENCODER, TEXTS, TIMM, network_family
from slipway.kinds.registry import TaskKind, kind_of, task_for
from slipway.project import findings, recipe
from slipway.project.column_roles import SampledColumn, sampled_columns
from slipway.project.gate import ProposedGate, class_gate, label_gate, number_gate
from slipway.project.inspection import data_params
from slipway.project.pretrained import Weights, WeightSearch
from slipway.project.rehearsal import settle
from slipway.project.summary import DataSummary
from slipway.project.task_choice import (
    Question,
    TaskChoice,
    choose,
    chosen_in,
    panel_question,
)
from slipway.system.errors import DataError, ParamsError
from slipway.system.user_code import is_user_code

_ENCODER_HEAD_RATE = 0.014  # features of MiniLM are half as large as those of images
_WIDTH = 100  # width of a terminal
_SMALL = 5_000  # rows, below which the classes are cut at exact fractions
_MIN_CLASS_ROWS = 3  # with fewer, a class is missing from a split
_DATES = "data.date_format"
CHOSEN = "as you chose"
DECIMALS = {"comma": ",", "point": "."}  # answers to the question on the decimal mark


@dataclass(frozen=True)
class ProjectProposal:
    """The params that differ from their defaults, or are the first to change, with reasons.

    If there is a question, `params` is empty: call `propose` again with `task` or `target`.
    """

    params: Mapping[str, Any]
    reasons: Mapping[str, str]  # reasons by "section.key", in the order of the file
    questions: tuple[Question, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # what was sampled
    panel: Question | None = None  # that has a proposed answer: the first candidate
    data: Path | None = None
    weights: Weights | None = None  # that the network starts from
    last_words: tuple[str, ...] = ()  # warnings to repeat after the project is written

    def value(self, key: str) -> str:
        """Return the proposed value of "section.key" as params.yaml writes it."""
        return as_plain_yaml(value_at(self.params, key))

    def text(self) -> str:
        """Return the keys to look at first with values and reasons, and the warnings, as text."""
        lines = [f"found: {'; '.join(note for note in self.notes if note)}", "", "proposed:"]
        width = max(map(len, self.reasons), default=0)
        for key, reason in self.reasons.items():
            value = textwrap.shorten(self.value(key), 40, placeholder=" ...")
            lines += wrapped(f"  {key:<{width}}  {value}  # {reason}", width + 4)
        lines += ["", "look at this:"] if self.warnings else []
        for warning in self.warnings:
            lines += wrapped(f"  * {warning}", 4)
        return "\n".join(lines)


def wrapped(text: str, indent: int) -> list[str]:
    """Return the text in lines; those below its first are commands, which stay whole."""
    first, *commands = text.split("\n")
    lines = textwrap.wrap(
        first,
        _WIDTH,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines + [f"{' ' * indent}  {command}" for command in commands]


def propose(
    summary: DataSummary,
    task: str | None = None,
    target: str | None = None,
    *,
    split_by: str | None = None,
    decimal: str | None = None,
    network: str | None = None,
    search: WeightSearch | None = None,
    machine: recipe.Machine | None = None,
) -> ProjectProposal:
    """Return params for the data, or the question to answer first.

    `split_by` answers the question `panel` of an earlier proposal; `decimal` names the mark of
    numbers that may mean two things; `network` is the user's choice; `search` tells of pretrained
    weights, for photographs and encoders only. Raises ParamsError for a task, target or network
    that does not suit the data, DataError if there is nothing to predict.
    """
    columns = [] if summary.table is None else sampled_columns(summary.table.columns.values())
    notation = _notation(summary, columns, decimal)
    read = notation.reread(columns)
    choice = notation.question_on(target, columns) or choose(summary, read, task, target, split_by)
    if isinstance(choice, TaskChoice) and choice.target is not None:
        choice = notation.question_on(choice.target.name, columns) or choice
    if isinstance(choice, TaskChoice) and _DATES not in kind_of(choice.task).input.keys:
        # Only tasks of tables have the key; others read ISO 8601 only.
        read, notation = columns, _Notation()
        choice = choose(summary, read, task, target, split_by)
    if isinstance(choice, Question):
        return ProjectProposal({}, {}, (choice,), notes=summary.notes, data=summary.path)
    weights, warnings = (None, ()) if search is None else (search.weights, search.warnings)
    if network is not None:
        require_network(network, choice.task, "--network")
        if network == ENCODER and (weights is None or weights.network != ENCODER):
            raise ParamsError(
                "--network is 'encoder', which begins with a pretrained folder, expected another "
                "network. Leave --network out, and then, in the project: "
                "slipway run train.network=encoder train.pretrained=FOLDER"
                + "".join(f"\n{warning}" for warning in warnings)
            )
    draft = _Draft(
        summary, choice, read, weights, machine or recipe.this_machine(), notation, network
    )
    draft.about_weights = warnings
    draft.fill()
    parse_params(draft.content)
    return ProjectProposal(
        draft.content,
        draft.reasons,
        warnings=tuple(draft.warnings),
        notes=(draft.sampled(), *summary.notes),
        data=summary.path,
        panel=None if summary.given else panel_question(choice.roles),
        weights=draft.used,
        last_words=tuple(draft.last_words),
    )


def recipe_for(
    summary: DataSummary,
    data: Mapping[str, Any],
    network: str | None,
    *,
    weights: Weights | None = None,
    machine: recipe.Machine | None = None,
) -> recipe.Values:
    """Return what `propose` sets for a network, each with its reason, by "section.key".

    `data` is the section of a project, whose task and columns stay as they are. Raises DataError if
    the data does not have the rows of the task.
    """
    columns = [] if summary.table is None else sampled_columns(summary.table.columns.values())
    notation = _notation(summary, columns, None)
    read = notation.reread(columns)
    choice = chosen_in(data, read)
    inputs = kind_of(choice.task).input
    if inputs.has_pixels != bool(summary.images) or inputs.has_texts != bool(choice.text_columns):
        raise DataError(f"{summary.path} does not have the rows of {choice.task!r}.")
    draft = _Draft(
        summary, choice, read, weights, machine or recipe.this_machine(), notation, network
    )
    draft.fill_recipe()
    return {key: (value_at(draft.content, key), reason) for key, reason in draft.reasons.items()}


@dataclass(frozen=True)
class _Notation:
    """Marks of numbers, words for missing cells and formats of dates, as a table's cells have."""

    numbers: FoundMarks = NO_NUMBERS
    words: Sequence[str] = ()
    formats: Mapping[str, str] = field(default_factory=dict)  # by column

    @property
    def date_format(self) -> str | None:
        """The format of the first column that needs one; data.date_format takes only one."""
        return next(iter(self.formats.values()), None)

    @property
    def marks(self) -> NumberMarks:
        """The marks of numbers, or the usual ones if it is not sure that others are right."""
        return self.numbers.choices[0] if len(self.numbers.choices) == 1 else POINT

    def question_on(self, target: str | None, columns: Sequence[SampledColumn]) -> Question | None:
        """Return a question if the numbers of the target may mean two things."""
        own = [column.raw for column in columns if column.name == target]
        found = marks_of(own)
        if len(self.numbers.choices) < 2 or len(found.choices) < 2:
            return None
        text = f"What is the decimal mark of {target!r}? It has numbers such as {found.shown}."
        names = {mark: name for name, mark in DECIMALS.items()}
        return Question("--decimal", text, tuple(names[one.decimal] for one in found.choices))

    def reread(self, columns: Sequence[SampledColumn]) -> list[SampledColumn]:
        """Return the columns as `clean` reads them if params.yaml has this notation."""
        if not self.words and not self.formats and self.marks == POINT:
            return list(columns)
        words = tuple(word.strip().lower() for word in self.words)
        return sampled_columns(
            replace(
                column.raw,
                written=column.raw.written._replace(
                    missing_values=words, date_format=self.date_format, marks=self.marks
                ),
            )
            for column in columns
        )


def _notation(
    summary: DataSummary, columns: Sequence[SampledColumn], decimal: str | None
) -> _Notation:
    if summary.form != "table" or summary.table is None:
        return _Notation()
    numbers = marks_of(column.raw for column in columns)
    if decimal is not None:
        mark = DECIMALS[decimal]
        chosen = [marks for marks in numbers.choices if marks.decimal == mark]
        numbers = numbers._replace(choices=chosen or [NumberMarks(mark)])
    notation = _Notation(numbers)
    data = data_params(summary.path, columns={}, missing_values=[], date_format=None)
    read = notation.reread(columns)
    table = replace(summary.table, columns={column.name: column.raw for column in read})
    words, formats = written_as(table, [column.guess for column in read], data)
    return replace(notation, words=words, formats=formats)


@dataclass
class _Draft:
    """The params of a new project while they are being proposed, section by section."""

    summary: DataSummary
    choice: TaskChoice
    columns: Sequence[SampledColumn]
    weights: Weights | None
    machine: recipe.Machine
    notation: _Notation = field(default_factory=_Notation)
    network: str | None = None  # the user's choice
    about_weights: Sequence[str] = ()  # warnings of the search for weights
    used: Weights | None = None  # the weights that the network starts from
    last_words: list[str] = field(default_factory=list)
    content: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    learned: dict[str, int] = field(default_factory=dict)  # rows of each class that is trained

    @property
    def kind(self) -> TaskKind:
        return kind_of(self.choice.task)

    def fill(self) -> None:
        """Fill in `content` from the facts about data and machine."""
        self._data()
        self._split()
        if self.choice.text_columns:
            names = [column.name for column in self.choice.text_columns]
            self.set("data.text_columns", names, "free text")
        elif not self.kind.input.has_pixels:
            self._table_cells()
        self.fill_recipe()
        if self.summary.form == "table":
            self._rehearse()
        self._gates()

    def fill_recipe(self) -> None:
        """Fill in the network and what belongs to it."""
        if self.kind.input.has_texts:
            self._text_recipe()
        elif not self.kind.input.has_pixels:
            self._table_recipe()
        else:
            self._image_recipe()
        self._outputs()

    def sampled(self) -> str:
        """Describe in words the rows and images that were inspected."""
        about = "" if self.summary.is_exact else "about "
        text = f"{about}{self.summary.num_rows:,} rows"
        if self.summary.images:
            text += f", {self.summary.images.num_read} images of them decoded"
        elif self.summary.table and len(self.summary.table.numbers) < self.summary.num_rows:
            text += f", {len(self.summary.table.numbers):,} of them read"
        return text

    def set(self, key: str, value: Any, reason: str) -> None:
        """Set "section.key" for a reason that the file gives beside it."""
        *sections, name = key.split(".")
        place = self.content
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
        self.reasons[key] = reason

    def set_all(self, values: recipe.Values) -> None:
        """Set several keys with their reasons."""
        for key, (value, reason) in values.items():
            self.set(key, value, reason)

    def _rehearse(self) -> None:
        """Ask the stages about the table, and take over what they need; see `settle`."""
        settled = settle(self.summary, self.content, self.columns)
        for change in settled.changes:
            self.set(*change)
        kept = self.content["data"].get("classes")
        self.learned = {name: n for name, n in self.learned.items() if kept is None or name in kept}
        self.warnings += settled.warnings

    def _data(self) -> None:
        summary, choice, roles = self.summary, self.choice, self.choice.roles
        self.set("data.path", str(summary.path), self.sampled())
        self.set("data.task", choice.task, choice.task_reason)
        self._form()
        if choice.target is not None:
            of_labels = [column.name for column in choice.label_columns]
            self.set("data.target_column", of_labels or choice.target.name, choice.target_reason)
            if self.kind.target.several and not of_labels and not choice.target.holds_lists:
                mark = choice.target.separator
                self.set("data.label_separator", mark, "between the labels of a cell")
        for key, column, reason in (
            ("group_column", roles.group, self._group_reason()),
            ("time_column", roles.time, "the test rows are the latest; null: a random split"),
            ("weight_column", roles.weight, "its name suggests it"),
            ("split_column", roles.split, "your own split"),
        ):
            if column is not None and not (key != "split_column" and summary.given):
                self.set(f"data.{key}", column.name, reason)
        if roles.panel is not None and not summary.given:
            self.warnings.append(findings.panel(roles.panel))
        elif roles.time is None:
            self.warnings += findings.date_columns(roles.dates)
        for target in choice.label_columns or ([] if choice.target is None else [choice.target]):
            self.warnings += findings.missing_targets(target)
        if self.kind.target.has_classes:
            self._classes()

    def _form(self) -> None:
        """Name the files, the sheet and the columns that hold the data."""
        summary = self.summary
        if summary.sources:
            self.set("data.sources", list(summary.sources), "tables of equal columns")
        if summary.sheet is not None:
            self.set("data.sheet", summary.sheet, "the sheet of the workbook that holds the table")
        if summary.encoding != "utf-8":
            self.set("data.encoding", summary.encoding, "the text is not UTF-8; check its letters")
        if summary.image_column:
            self.set("data.image_column", summary.image_column, "holds or names the images")

    def _group_reason(self) -> str:
        if (panel := self.choice.roles.panel) is not None:
            return f"it repeats once per {panel.time.name!r}: the test rows have other values"
        return "its values repeat; null if equal values mean nothing"

    def class_counts(self) -> dict[str, int]:
        """Return the number of rows of each class, estimated for the whole data set."""
        if self.choice.target is None:
            return dict(self.summary.classes)
        counts = self.choice.target.counts
        if self.choice.label_columns:
            counts = label_column_counts(self.choice.label_columns)
        elif self.kind.target.several:
            counts = self.choice.target.label_counts
        factor = max(1.0, self.summary.num_rows / max(1, len(self.choice.target.raw.codes)))
        return {name: round(number * factor) for name, number in counts.items()}

    def _classes(self) -> None:
        allowed = default_of(Params, "clean.max_bad_fraction")
        counts, joins = self.class_counts(), not self.choice.label_columns
        found = variants(counts) if joins else {}
        if found:
            self.set("data.label_map", found, "spellings of one class")
            self.warnings.append(
                f"classes that differ only in spelling are joined: {listed_variants(found, counts)}"
            )
            counts = dict(joined_counts(counts))
        if joins:
            self.warnings += findings.misspelt(counts, self.content["data"].get("label_map", {}))
        self.learned = counts
        is_given = bool(self.summary.given or self.choice.roles.split)
        tiny = {n: rows for n, rows in counts.items() if rows < _MIN_CLASS_ROWS and not is_given}
        shown = ", ".join(f"{name!r} ({rows} rows)" for name, rows in list(tiny.items())[:5])
        may_leave_out = len(counts) - len(tiny) > 1 and not self.kind.target.several
        if tiny and may_leave_out and sum(tiny.values()) <= allowed * sum(counts.values()):
            kept = [name for name in counts if name not in tiny]
            self.learned = {name: counts[name] for name in kept}
            self.set("data.classes", kept, f"without {shown}: too few rows for three splits")
            self.warnings.append(
                f"left out classes with too few rows for train, val and test: {shown}. Add rows, "
                "and set data.classes to null"
            )
        elif tiny and self.summary.form != "table":  # of tables, `settle` leaves them out
            self.warnings.append(
                f"classes with too few rows for train, val and test: {shown}. The run will stop "
                "there: add rows, or join classes with data.label_map"
            )
        if joins and self.choice.target is not None:
            self.warnings += findings.missing_names(self.choice.target, self.content["data"])
        self.warnings += findings.small_classes({n: counts[n] for n in counts if n not in tiny})

    # Rows ----------------------------------------------------------------------------------------

    def _split(self) -> None:
        if self.summary.given:
            found = ", ".join(f"{n:,} {name}" for name, n in self.summary.given.items())
            if "val" in self.summary.given and "test" not in self.summary.given:
                found += "; val is the test split, and validation rows are cut from train"
            if self.summary.split_file is None:
                self.set("data.split_folders", "auto", f"the names give the split: {found}")
            else:
                path = str(self.summary.split_file)
                self.set("data.split_file", path, f"it gives the split: {found}")
        if self.summary.num_rows < _SMALL:
            few = f"fewer than {_SMALL:,} rows: exact fractions in each class"
            self.set("split.assignment", "exact", few)

    def rows_of(self, split: str) -> int:
        """Return the expected rows of train, val or test."""
        given, target = dict(self.summary.given), self.choice.target
        num_rows = self.summary.num_rows * (1 - (target.missing_fraction if target else 0))
        if not given and self.choice.roles.split is not None:
            counts = self.choice.roles.split.counts
            factor = num_rows / max(1, counts.total())
            given = {name.lower(): round(rows * factor) for name, rows in counts.items()}
        fractions: dict[str, float] = SplitParams().model_dump()
        if not given:
            return round(num_rows * fractions[split])
        if "val" in given and "test" not in given:
            given["test"] = given.pop("val")
        if split in given and split != "train":
            return given[split]
        missing = [name for name in ("val",) if name not in given]
        shares = {name: fractions[name] for name in ("train", *missing)}
        return round(given.get("train", 0) * shares[split] / sum(shares.values()))

    def _gates(self) -> None:
        num_test = max(1, self.rows_of("test"))
        if self.kind.target.several:
            gate: ProposedGate = label_gate(self._set_counts(), num_test)
        elif self.kind.target.has_classes:
            gate = class_gate(self.learned, num_test)
            if gate.metric == "balanced_accuracy":
                self.set("train.class_weights", "balanced", "so that rare classes count")
            if len(self.learned) <= (best := default_of(Params, "evaluate.top_k")):
                self.set("evaluate.top_k", None, f"the best {best} always include the right class")
        else:
            gate = number_gate(num_test)
        bounds = {} if gate.bound is None else {gate.metric: {"min": gate.bound, "max": None}}
        self.set("evaluate.gates", bounds, f"baseline: {gate.reason}")
        if gate.bound is None:
            self.warnings.append(f"no gate: {gate.reason}. More rows are needed")

    def _set_counts(self) -> Counter[str]:
        """Return the number of sampled rows with each set of labels."""
        assert self.choice.target is not None
        if not self.choice.label_columns:
            return self.choice.target.counts
        cells = [typed_column(column.raw, "boolean").cells for column in self.choice.label_columns]
        return Counter(map(str, np.stack(cells, axis=1).tolist()))

    # Tables --------------------------------------------------------------------------------------

    def inputs(self) -> list[SampledColumn]:
        """Return the columns of the table that the model reads."""
        roles = self.choice.roles
        taken = [roles.group, roles.time, roles.weight, roles.split, self.choice.target]
        taken += self.choice.label_columns
        names = {column.name for column in taken if column is not None}
        return [c for c in self.columns if c.name not in names and c.guess.kind != "ignore"]

    def _read_counters(self) -> None:
        """Read years and the like, which count the rows, if no other column is left as an input."""
        special = {column.name for column in self.choice.roles.special}
        counters = [
            column.name
            for column in self.columns
            if column.name not in special and column != self.choice.target
            if column.guess.kind == "ignore" and counts_rows(column.raw)
            if min(column.numbers) > 1  # from 0 or 1 on, they are numbers of rows
        ]
        if self.inputs() or not counters:
            return
        number = {"kind": "number", "min": None, "max": None, "required": False}
        shown = ", ".join(map(repr, counters))
        self.set(
            "data.columns", dict.fromkeys(counters, number), f"{shown}: no other input is left"
        )
        self.columns = [
            replace(column, guess=ColumnGuess(column.name, "number", ""))
            if column.name in counters
            else column
            for column in self.columns
        ]

    def _table_cells(self) -> None:
        self._numbers()
        self._categories()
        self._read_counters()
        if self.notation.words:
            words = list(self.notation.words)
            self.set("data.missing_values", words, "they occur among numbers or dates")
        formats, chosen = self.notation.formats, self.notation.date_format
        if chosen is not None:
            names = ", ".join(repr(name) for name, written in formats.items() if written == chosen)
            self.set(_DATES, chosen, f"the dates of {names} are written so; check day and month")
        used = [*self.choice.roles.special, *self.choice.label_columns, self.choice.target]
        others = {name: written for name, written in formats.items() if written != chosen}
        rest = {column.name for column in used if column is not None} | others.keys()
        inputs, target, of_classes = self.inputs(), self.choice.target, self.kind.target.has_classes
        self.warnings += [
            *findings.other_dates(self.columns, others),
            *findings.free_texts(self.columns, task_for(TEXTS, self.kind.target)),
            *findings.unread(self.columns, rest),
            *findings.mostly_missing(inputs),
        ]
        if target is not None and not self.choice.label_columns:
            columns = self.content["data"].get("columns", {})
            self.warnings += [
                *findings.suspected_leaks(inputs, target, columns, of_classes=of_classes),
                *findings.computed_columns(inputs, target, columns),
            ]

    def _numbers(self) -> None:
        """Propose the marks of numbers that are not written like -1234.5, and name the units."""
        marks, shown = self.notation.marks, self.notation.numbers.shown
        if marks != POINT:
            if marks.decimal != POINT.decimal:
                self.set("data.decimal", marks.decimal, f"the mark of numbers such as {shown}")
            if marks.thousands is not None:
                self.set("data.thousands", marks.thousands, f"between thousands; seen: {shown}")
        choices = self.notation.numbers.choices
        if choices[1:] and choices[0] == POINT:
            others = self.notation.numbers._replace(choices=choices[1:])
            self.warnings.append(
                f"numbers such as {shown}, are read with a decimal point. If they have thousands, "
                f"set {others.settings}"
            )
        target = [] if self.choice.target is None else [self.choice.target]
        self.warnings += findings.units([*self.inputs(), *target])

    def _categories(self) -> None:
        """Propose a map for each input with several spellings of one category."""
        inputs = [column for column in self.inputs() if column.guess.kind == "category"]
        found = {column.name: variants(column.counts) for column in inputs}
        columns = {
            name: {"kind": "category", "map": meant} for name, meant in found.items() if meant
        }
        if columns:
            self.set("data.columns", columns, "spellings of one category")
        self.warnings += [
            f"values of {column.name!r} that differ only in spelling are joined: "
            f"{listed_variants(found[column.name], column.counts)}"
            for column in inputs
            if found[column.name]
        ]

    def _table_recipe(self) -> None:
        num_train = self.rows_of("train")
        arguments = TabmArguments()
        length = recipe.table_length(len(self.inputs()), arguments, num_train, self.machine)
        network, reason = "tabm", "the network for tables"
        if self.network is not None:
            network, reason = self.network, CHOSEN
        elif "trees" in self.kind.target.parts:
            network, reason = recipe.table_network(length, self.machine)
        self.set("train.network", network, reason)
        if network in self.kind.input.trees:
            rounds = f"rounds at most; about {num_train:,} training rows"
            self.set("train.epochs", TrainParams.DEFAULTS[network]["epochs"], rounds)
        elif network == "tabm":
            self._length(length)
        else:
            self._batch_size(recipe.batch_size(num_train))
        self._usual_rate(network)

    # Texts ---------------------------------------------------------------------------------------

    def _text_recipe(self) -> None:
        num_train = self.rows_of("train")
        values = recipe.text_values([column.raw for column in self.choice.text_columns])
        self.set_all(values)
        size = values["precompute.max_text_bytes"][0]
        network, reason = self.network or "hashed_ngrams", CHOSEN
        if self.network is None:
            reason = "learns words and parts of words in seconds"
        self.set("train.network", network, reason)
        if network == ENCODER:
            assert self.weights is not None
            self.set_all(recipe.encoder_values(self.weights, size))
            self.used = self.weights
            if not self.machine.has_gpu:
                length = recipe.head_length(num_train, self.machine)
                self.set("train.freeze_epochs", length.epochs, recipe.FROZEN)
                self._length(length)
                self._rate(length.batch_size, "frozen", usual=_ENCODER_HEAD_RATE)
                return
        if network in ("hashed_ngrams", "small_transformer"):
            self._length(recipe.text_length(network, size, num_train, self.machine))
        else:
            self._batch_size(recipe.batch_size(num_train))
        self._usual_rate(network)

    def _usual_rate(self, network: str) -> None:
        rate = TrainParams.DEFAULTS.get(network, {}).get("learning_rate")
        if rate is not None:
            self.set("train.learning_rate", rate, "usual for this network")

    def _rate(
        self,
        batch_size: int,
        start: recipe.Start,
        *,
        is_small: bool = False,
        usual: float | None = None,
    ) -> None:
        known, why = {
            "scratch": (0.004 if is_small else 0.001, "usual for this network"),
            "pretrained": (0.001, "fine-tuning"),
            "frozen": (0.003, "usual for a head alone"),
        }[start]
        rate = float(f"{(usual or known) * (batch_size / 128) ** 0.5:.1g}")
        self.set("train.learning_rate", rate, f"{why} at this batch size")

    def _length(self, length: recipe.Length) -> None:
        self.set("train.epochs", length.epochs, length.reason)
        self._batch_size(length.batch_size)

    def _batch_size(self, size: int) -> None:
        self.set("train.batch_size", size, "some tens of steps in an epoch")

    # Images --------------------------------------------------------------------------------------

    def _image_recipe(self) -> None:
        images = self.summary.images
        assert images is not None
        num_train, is_number = self.rows_of("train"), not self.kind.target.has_classes
        are_photographs = recipe.are_photographs(images)
        weights = self.weights if self.network or are_photographs else None
        if self.network is not None and weights is not None and weights.network != self.network:
            weights = None
        if are_photographs and self.network in (None, weights and weights.network):
            self.warnings[:0] = self.about_weights
            self.last_words += self.about_weights
        self.used = weights
        network = self.network or (weights.network if weights else "small_resnet")
        values = recipe.image_values(images, is_number, weights is not None)
        self.set_all(values)
        size = values["precompute.image_size_px"][0]
        chosen, forbid, reason = recipe.augmentation(images, self.class_counts(), size, is_number)
        is_frozen = network_family(network) == TIMM and weights is not None
        is_frozen = is_frozen and not self.machine.has_gpu
        if not is_frozen:  # a frozen body computes once, if it sees the same images in every epoch
            for key, value in chosen.items():
                self.set(f"augment.{key}", value, "suits such images")
        if forbid:
            self.set("augment.forbid", forbid, reason)
        width = None
        if network == "small_resnet":
            width = recipe.small_resnet_width(size, num_train, self.machine)
        start: recipe.Start = (
            "frozen" if is_frozen else "scratch" if weights is None else "pretrained"
        )
        length = recipe.image_length(size, width, start, num_train, self.machine)
        frozen_epochs = length.epochs if is_frozen else None
        self.set_all(recipe.image_network(network, weights, width, frozen_epochs))
        if self.network is not None:
            self.reasons["train.network"] = CHOSEN
        if is_user_code(network):
            self._batch_size(length.batch_size)
        else:
            self._length(length)
        self._rate(length.batch_size, start, is_small=width is not None)
        if not is_number:
            self.set("train.label_smoothing", 0.05, "some labels may be wrong")
        if self.machine.has_amx and not self.machine.has_gpu and num_train * size**2 > 1e7:
            self.set("train.precision", "bf16-mixed", "this processor is twice as fast with it")
        if images.dark_range:
            self.warnings.append(
                "the images have 16 bits and use few of them: they will be dark. Rescale them"
            )

    def _outputs(self) -> None:
        variants = default_of(Params, "export.variants")
        if self.machine.has_gpu and self.content["train"]["network"] not in self.kind.input.trees:
            self.set("export.variants", [*variants, "int8_tensorrt"], "the last for TensorRT")


def label_column_counts(columns: Sequence[SampledColumn]) -> Counter[str]:
    """Return the number of rows with each label, for tables with one column per label."""
    return Counter(
        {
            column.name: int((typed_column(column.raw, "boolean").cells == 1).sum())
            for column in columns
        }
    )
