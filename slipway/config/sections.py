"""The typed sections of `params.yaml`, with units, bounds, and rules between a section's keys.

The sections of a training, an ensemble, a search and the loop are in modules of their names.
slipway/config/contradictions.py checks the rules between sections, params.py reads the file.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from encodings.aliases import aliases
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from slipway.config.yaml_text import as_yaml
from slipway.inputs.images import MAX_PIXELS
from slipway.inputs.texts import PersonalData
from slipway.kinds.registry import Task
from slipway.system.errors import nearest
from slipway.system.user_code import NAME

Fraction = Annotated[float, Field(ge=0, le=1)]
OpenFraction = Annotated[float, Field(gt=0, lt=1)]
Positive = Annotated[int, Field(ge=1)]
NotNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
LicenseText = Annotated[str, Field(min_length=1, max_length=200, examples=["Apache-2.0"])]
# Your own code.
UserName = Annotated[str, Field(pattern=f"^{NAME}$", examples=["package.module:function"])]
# refuse: quarantine the row; flag: keep it and name the rule in rows.parquet; null: do not check.
Action = Literal["refuse", "flag"] | None
# Defaults other than those beside the keys, by a choice of params.yaml: the kind of input
# (slipway/kinds/inputs.py) or target (slipway/kinds/targets.py), or the network.
ByChoice = Mapping[str, Mapping[str, Any]]
Variant = Literal["fp32", "fp16", "int8", "int8_dynamic", "int8_tensorrt", "pruned", "pruned_int8"]
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
WORKBOOK = ".xlsx"
PRUNED_VARIANTS: tuple[Variant, ...] = ("pruned", "pruned_int8")


class ParamsSection(BaseModel):
    """A strict section: no unknown keys, no type conversion, finite numbers only."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    DEFAULTS: ClassVar[ByChoice] = {}

    @model_validator(mode="after")
    def _has_no_problems(self) -> Self:
        if problems := list(self.problems()):
            raise ValueError(*problems)
        return self

    def problems(self) -> Iterable[str]:
        """Return a message for each contradiction between keys that are valid on their own."""
        return ()


def default_of(section: type[BaseModel], key: str) -> Any:
    """Return the default of a key such as "clean.rules.blurred", relative to `section`.

    Defaults that depend on a choice are not considered (`ParamsSection.DEFAULTS`).
    """
    name, _, inner = key.partition(".")
    field = section.model_fields[name]
    return default_of(field.annotation, inner) if inner else field.default  # type: ignore[arg-type]


def belongs_to(key: str, chosen: str, choice: str, **values: object) -> list[str]:
    """Return messages for values that `choice` of `key` needs and all other choices refuse."""
    if chosen == choice:
        return [
            f"{key} is {chosen!r}, which needs {name}"
            for name, value in values.items()
            if value is None
        ]
    return [
        f"{name} is {value!r}, but {key} is {chosen!r}: set it to null"
        for name, value in values.items()
        if value is not None
    ]


def named_twice(key: str, names: Sequence[str]) -> Iterator[str]:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield f"{key} names {', '.join(map(repr, twice))} more than once"


class ColumnParams(ParamsSection):
    """Corrections for one table column. reports/columns.yaml lists the inferred types."""

    kind: Literal["number", "category", "boolean", "date", "ignore"]  # ignore: not an input
    min: float | None = None  # smaller numbers are out of range; null for no bound
    max: float | None = None
    required: bool = False  # true: a missing value is refused
    # Spellings of a category: {found: meant}.
    map: dict[str, str] = {}

    def problems(self) -> Iterator[str]:
        if self.map and self.kind != "category":
            yield f"map is for spellings of categories, the kind is {self.kind!r}; set it to {{}}"
        if (self.min is not None or self.max is not None) and self.kind != "number":
            yield f"min and max are for numbers, the kind is {self.kind!r}"
        if self.min is not None and self.max is not None and self.min > self.max:
            yield f"min {self.min} is above max {self.max}"


_COLUMN = {"kind": "number", "min": 0, "max": None, "required": False}
Columns = Annotated[dict[str, ColumnParams], Field(examples=[{"age": _COLUMN}])]


class DataParams(ParamsSection):
    """Location of the raw data and the meaning of its columns."""

    # A folder with one sub-folder per class, a table (.csv, .parquet, .pq, .jsonl, .ndjson, .xlsx),
    # or a .zip, .tar or .tar.gz of these.
    path: Annotated[str, Field(examples=["data/raw"])]
    # Paths and globs inside the folder `path`, which are joined; null: all of `path` is one source.
    sources: Annotated[list[str], Field(min_length=1, examples=[["2024/*.csv"]])] | None = None
    # Of a .csv or of text files, a name that Python knows.
    encoding: Annotated[str, Field(examples=["utf-8"])] = "utf-8"
    # Of the names in an archive that does not declare UTF-8, such as cp932; null: UTF-8 or cp437.
    archive_encoding: str | None = None
    # Of a workbook: the name of the sheet that holds the table; null: the first one.
    sheet: str | None = None
    # What to predict: one class, several labels or a number, for each image, row or text. The gates
    # of evaluate name metrics of this task.
    task: Task
    # Holds image bytes ({bytes, path} or binary) or a path relative to the file. Used by image
    # tasks that read a table.
    image_column: str = "image"
    # Text tasks: the columns with the texts of a row, which are joined in this order.
    text_columns: Annotated[list[str], Field(examples=[["title", "text"]])] = []
    # Class names or numbers, without effect for a folder. Several labels: a column of lists, or a
    # list of columns of true and false, one for each label.
    target_column: str | Annotated[list[str], Field(min_length=2, examples=[["cat", "dog"]])] = (
        "label"
    )
    # Several labels: between the labels of a cell that is text and no JSON list.
    label_separator: Annotated[str, Field(min_length=1, examples=["|"])] = "|"
    group_column: str | None = None  # rows of one group stay in one split
    time_column: str | None = None  # the test split is the latest, the training split the earliest
    weight_column: str | None = None  # weight of a row in the training loss; null: equal weights
    # The user's own split (train, val, test). null: split_folders decides, or Slipway splits.
    split_column: str | None = None
    # Or a file that names the split of each row: .csv, .jsonl or .parquet.
    split_file: str | None = None
    # Folders and shards named after splits. auto: they are the given split; pool: Slipway
    # splits all rows; classes: the folders are classes.
    split_folders: Literal["auto", "pool", "classes"] = "auto"
    # Spelling variants of a class: {found: meant}. {NA: NA} keeps a class that counts as missing.
    label_map: dict[str, str] = {}
    # The allowed classes; a name such as 0x1F is text as it is written. The rule `unknown_label`
    # handles any other label. null: all found.
    classes: list[str] | None = None
    # Table tasks: corrections of the inferred column types; `map` joins spellings of a category.
    columns: Columns = {}
    # Table tasks: cells that count as missing, besides the usual words.
    missing_values: list[str] = []
    # Table tasks: how dates are written other than in ISO 8601, such as "%d/%m/%Y".
    date_format: str | None = None
    # Table tasks: the decimal mark of numbers in text, as in 1.234,56. JSON has numbers.
    decimal: Literal[".", ","] = "."
    # The mark between thousands; a space is also one that does not break a line. null: none,
    # except commas in a column whose other cells prove the decimal point.
    thousands: Literal[",", ".", "'", " "] | None = None
    checksums: str | None = None  # file of lines "SHA-256  path", as sha256sum writes them
    engine: Literal["local", "ray"] = "local"  # runs clean and precompute

    @field_validator("path", mode="before")
    @classmethod
    def _path_is_one(cls, path: Any) -> Any:
        if isinstance(path, list):
            raise ValueError(
                "found a list, expected one folder, table or archive; for several, set it to "
                "their folder and list them in data.sources"
            )
        return path

    @field_validator("path")
    @classmethod
    def _path_is_not_empty(cls, path: str) -> str:
        if not path.strip():  # DVC, which has it as a dependency, ends with an unexpected error
            raise ValueError(f"found {path!r}, expected a folder, a table or an archive")
        return path

    @field_validator("sources")
    @classmethod
    def _sources_are_inside(cls, sources: list[str] | None) -> list[str] | None:
        for entry in sources or ():
            path = PurePosixPath(entry)
            if not entry.strip() or path.is_absolute() or ".." in path.parts:
                raise ValueError(f"found {entry!r}, expected a path or a glob inside data.path")
        return sources

    @property
    def target_columns(self) -> list[str]:
        """The columns of the target: one, or one for each label."""
        named = self.target_column
        return [named] if isinstance(named, str) else named

    def problems(self) -> Iterator[str]:
        if isinstance(self.target_column, list):
            yield from named_twice("target_column", self.target_column)
        yield from named_twice("text_columns", self.text_columns)
        if self.split_column is not None and self.split_file is not None:
            yield "split_column and split_file both give the split; set one of them to null"
        if self.decimal == self.thousands:
            yield (
                f"decimal and thousands are both {self.decimal!r}, expected two different marks; "
                "set thousands to null, or to the mark between thousands"
            )
        if self.sheet is not None and not self._may_name(WORKBOOK):
            yield f"sheet is for a workbook ({WORKBOOK}), and path is {self.path!r}; remove it"
        if self.archive_encoding is not None and not self._may_name(*ARCHIVES):
            yield f"archive_encoding is for an archive, and path is {self.path!r}; remove it"

    def _may_name(self, *endings: str) -> bool:
        """Return True if the data, or a glob of its sources, may be a file with such an ending."""
        return any(
            name.lower().endswith((*endings, "*")) for name in (self.path, *(self.sources or ()))
        )

    @field_validator("encoding", "archive_encoding")
    @classmethod
    def _encoding_is_known(cls, encoding: str | None) -> str | None:
        if encoding is None:
            return None
        try:
            "a".encode(encoding)
        except (LookupError, ValueError):
            name = encoding.lower().replace("_", "-")
            known = {known.replace("_", "-") for known in {*aliases, *aliases.values()}}
            close = nearest(name, sorted(known - {name}))
            raise ValueError(
                f"found {encoding!r}, which is not a text encoding; "
                f"did you mean {(close or ['utf-8'])[0]!r}?"
            ) from None
        return encoding

    @field_validator("date_format")
    @classmethod
    def _date_format_holds_a_date(cls, date_format: str | None) -> str | None:
        if date_format is not None:
            try:
                moment = datetime(2019, 12, 31)
                read = datetime.strptime(moment.strftime(date_format), date_format)
            except ValueError:
                read = None
            if read is None or read.replace(tzinfo=None) != moment:
                raise ValueError(
                    f"found {date_format!r}, expected a day, a month and a year, such as %d/%m/%Y"
                )
        return date_format


class RuleParams(ParamsSection):
    """The action for rows that break a rule, per rule.

    docs/reference/data.md lists the rules whose action is fixed.
    """

    # flag: its cluster stays in one split; refuse: one row per cluster.
    near_duplicate: Action = "flag"
    # Equal rows of a table without ids. flag: all are kept, in one split; refuse: one is kept.
    duplicate_row: Action = "flag"
    conflicting_label: Action = "refuse"  # equal images or rows with different classes or targets
    unknown_label: Action = "refuse"  # a label that is not in data.classes
    # An image whose content is of another format than its name says.
    wrong_extension: Action = "flag"
    # A side below clean.min_side_px.
    too_small: Action = "refuse"
    # All pixels nearly equal: a deviation below clean.constant_std.
    constant_image: Action = "refuse"
    # A sharpness below clean.blur_variance.
    blurred: Action = "flag"
    # A mean below clean.dark_mean.
    too_dark: Action = "flag"
    # A mean above clean.bright_mean.
    too_bright: Action = "flag"
    # Longer side over shorter side above clean.max_aspect.
    odd_aspect: Action = "flag"
    outlier: Action = "flag"  # numbers of a table, and numeric targets
    type_violation: Action = "refuse"  # flag: the cell counts as missing
    out_of_range: Action = "refuse"  # flag: the cell counts as missing
    # A row without any input.
    all_missing: Action = "refuse"
    constant_column: Action = "refuse"  # refuse: the column is not an input
    duplicate_column: Action = "refuse"  # refuse: the second of the two is not an input
    too_short: Action = "refuse"  # texts
    too_long: Action = "refuse"  # texts
    control_characters: Action = "flag"  # in a text; flag: each run of them becomes a space
    garbled: Action = "flag"  # a text that was read in another encoding
    mixed_script: Action = "flag"  # a word of Latin and Greek or Cyrillic letters
    rare_script: Action = "flag"  # a text in a script of less than 1 % of the texts
    # In a text; precompute.mask_personal_data hides it from the network.
    personal_data: Action = "flag"
    boilerplate: Action = "flag"  # a passage that many texts of one class have and no other text


class CleanParams(ParamsSection):
    """Limits beyond which a row is refused or flagged, and the allowed number of bad rows."""

    # Equal rows of a table with different outcomes are what a probability describes.
    DEFAULTS: ClassVar[ByChoice] = {"columns": {"rules": {"conflicting_label": "flag"}}}

    # The stage fails if refused rows are a larger fraction of the rows with a target. Duplicates do
    # not count.
    max_bad_fraction: Fraction = 0.05
    num_workers: NotNegativeInt = 0  # decoding processes; 0: one per core
    min_side_px: Positive = 4  # a shorter side breaks too_small
    # Larger images are refused before they are decoded; the service has the same limit.
    max_pixels: Annotated[int, Field(ge=1, le=MAX_PIXELS)] = 50_000_000
    # Near duplicates differ in at most this many of the 64 bits of the perceptual hash.
    near_duplicate_bits: Annotated[int, Field(ge=0, le=16)] = 8
    # Near duplicates share at least this fraction of their sequences of four characters.
    near_duplicate_similarity: Annotated[float, Field(ge=0.5, le=1)] = 0.7
    constant_std: NotNegative = 1.0  # grey levels of 255; a smaller deviation is a constant_image
    # Variance of the Laplacian, in grey levels squared; less is blurred.
    blur_variance: NotNegative = 5.0
    # Grey levels; a darker mean is too_dark.
    dark_mean: Annotated[float, Field(ge=0, le=255)] = 10.0
    # Grey levels; above it is too_bright.
    bright_mean: Annotated[float, Field(ge=0, le=255)] = 245.0
    max_aspect: Annotated[float, Field(ge=1)] = 8.0  # longer side over shorter side
    # Distance from the median in robust standard deviations (1.4826 MAD) that makes an outlier.
    outlier_mad_threshold: PositiveFloat = 8.0
    min_characters: Positive = 1  # fewest characters of a text; fewer break too_short
    max_characters: Positive = 1_000_000  # most characters of a text; more break too_long
    # Most members of an archive; one with more is refused before it is unpacked.
    max_archive_members: Positive = 1_000_000
    max_archive_ratio: Positive = 200  # unpacked bytes over packed bytes of a whole archive
    rules: RuleParams = RuleParams()


_TimeCuts = Annotated[
    list[str], Field(min_length=2, max_length=2, examples=[["2024-01-01", "2024-07-01"]])
]


class SplitParams(ParamsSection):
    """Fractions of the three splits. Each class is split in these fractions."""

    # Fractions of the rows, which add up to 1. A given split has its own.
    train: OpenFraction = 0.7
    val: OpenFraction = 0.15
    test: OpenFraction = 0.15
    # stable: the row's own content decides, so new rows move no old one; exact: exact fractions
    # in each class.
    assignment: Literal["stable", "exact"] = "stable"
    # report: leaked rows are marked, and metrics come with and without them; auto: report with a
    # given split, else fail.
    on_leak: Literal["auto", "fail", "report"] = "auto"
    # Times at which val and test begin. null: the fractions decide.
    time_cuts: _TimeCuts | None = None
    folds: Annotated[int, Field(ge=2)] | None = None  # folds of the rows outside test
    fold: NotNegativeInt = 0  # the fold that is val, counted from 0

    def problems(self) -> Iterator[str]:
        total = self.train + self.val + self.test
        if abs(total - 1) > 1e-9:
            yield f"train {self.train} + val {self.val} + test {self.test} is {total:g}, expected 1"
        if self.fold >= (self.folds or 1):
            folds = as_yaml(self.folds)
            yield f"fold is {self.fold}, expected less than folds {folds} (0 without folds)"


class PrecomputeParams(ParamsSection):
    """Format of the network's input."""

    image_size_px: Annotated[int, Field(ge=4, le=4096)] = 64  # side of the square
    # Side that training images are stored with, for random crops. null: image_size_px.
    train_size_px: Annotated[int, Field(ge=4, le=4096)] | None = None
    channels: Literal[1, 3] = 3  # 1 grey, 3 RGB
    resize_mode: Literal["stretch", "crop", "pad"] = "crop"  # turns an oblong image into a square
    # Of the resizing, by Pillow; the service does the same.
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"] = "bilinear"
    # Format of the packed pixels. jpeg is lossy, slower to read, and takes an eighth of the disk.
    encoding: Literal["raw", "jpeg"] = "raw"
    jpeg_quality: Annotated[int, Field(ge=1, le=100)] = 95  # without effect for raw
    transform: str | None = None  # your function "package.module:function" on each decoded image
    num_workers: NotNegativeInt = 0  # decoding processes; 0: one per core
    # Most categories of a column; rarer ones count as unknown. Beyond 2048 fp16 is inexact.
    max_categories: Annotated[int, Field(ge=1, le=2000)] = 1000
    num_quantiles: Annotated[int, Field(ge=2, le=256)] = 48  # bins of a numeric column's embedding
    # Bytes of a text in UTF-8 that the network sees; longer texts are cut, and answers say so.
    max_text_bytes: Annotated[int, Field(ge=16, le=65536)] = 512
    # null: the network reads the bytes of a text. bpe: tokens, learned from the training texts. Or
    # a tokenizer.json, or a folder of Hugging Face's with one.
    tokenizer: Annotated[str, Field(min_length=1, examples=["bpe"])] | None = None
    vocabulary_size: Annotated[int, Field(ge=300, le=200_000)] | None = None  # only for bpe
    max_tokens: Annotated[int, Field(ge=8, le=8192)] | None = None  # of a text; longer ones are cut
    # Personal data that a text shows only as [email], [phone] or [card], in the service as well.
    mask_personal_data: Annotated[
        list[PersonalData], Field(examples=[["email", "phone", "card"]])
    ] = []

    def problems(self) -> Iterator[str]:
        yield from named_twice("mask_personal_data", self.mask_personal_data)
        own = {"vocabulary_size": self.vocabulary_size}
        yield from belongs_to("tokenizer", self.tokenizer or "null", "bpe", **own)
        if (self.tokenizer is None) != (self.max_tokens is None):
            yield (
                f"tokenizer is {as_yaml(self.tokenizer)}, but max_tokens is "
                f"{as_yaml(self.max_tokens)}: set both, or both to null"
            )
        if self.train_size_px is not None and self.train_size_px < self.image_size_px:
            yield f"train_size_px is {self.train_size_px}, below image_size_px {self.image_size_px}"


class Gate(ParamsSection):
    """The required range of a metric."""

    min: float | None = None
    max: float | None = None

    def problems(self) -> Iterator[str]:
        if self.min is None and self.max is None:
            yield "min and max are both null, expected at least one of them"
        if self.min is not None and self.max is not None and self.min > self.max:
            yield f"min {self.min:g} is above max {self.max:g}"


# Gates by metric.
Gates = Annotated[dict[str, Gate], Field(examples=[{"accuracy": {"min": 0.9, "max": None}}])]


class CostParams(ParamsSection):
    """Costs of decisions between two classes, in any unit; a right decision costs nothing."""

    false_positive: NotNegative  # the positive class is answered, and wrong
    false_negative: NotNegative  # the other class is answered, and wrong
    abstain: PositiveFloat | None = None  # leave the row to a person; null: never

    def problems(self) -> Iterator[str]:
        if self.false_positive + self.false_negative == 0:
            yield "false_positive and false_negative are both 0, expected one of them above 0"
        dearest = max(self.false_positive, self.false_negative)
        if self.abstain is not None and self.abstain >= dearest > 0:
            yield f"abstain is {self.abstain:g}, expected less than {dearest:g}, or null"


class DecisionParams(ParamsSection):
    """The rule that turns the probability of one of two classes into a decision."""

    positive: str  # the class that has the threshold
    # Its threshold has the lowest cost on validation rows; null: the largest F1.
    costs: CostParams | None = None


_DECISION = {"positive": "spam", "costs": {"false_positive": 5, "false_negative": 1, "abstain": 1}}
Rule = Annotated[DecisionParams, Field(examples=[_DECISION])]


class MeasuringParams(ParamsSection):
    """Keys of `evaluate` that `prune` also reads: calibration, and measurement of predictions."""

    # Rows that the network answers at once, which has no effect on the result.
    batch_size: Positive = 512
    bootstrap_samples: Annotated[int, Field(ge=100)] = 1000  # resamples behind each interval
    confidence: OpenFraction = 0.95  # confidence of the intervals
    # Of probabilities, fitted on validation rows.
    calibration: Literal["temperature"] | None = "temperature"
    # Two classes: a threshold, chosen on validation rows. null: the most probable class.
    decision: Rule | None = None
    coverage: OpenFraction = 0.9  # coverage of prediction sets and intervals
    ood_fraction: OpenFraction = 0.01  # of ordinary rows that may be flagged as out of distribution


class EvaluateParams(MeasuringParams):
    """Measurements on the test split, and the requirements for a release."""

    metrics: list[UserName] = []  # your own functions, besides the built-in metrics
    top_k: Positive | None = 3  # k of top_k_accuracy; null: no such metric
    gates: Gates = {}  # a model that misses one is neither served nor released
    # Columns of the user's table that also cut the test rows into slices. Class, size, brightness
    # and group are always slices.
    slices: list[str] = []
    slice_min_rows: Annotated[int, Field(ge=2)] = 20  # smaller slices are listed, but not judged
    slice_gates: Gates = {}  # required of every judged slice
    # Folder of an earlier bundle to compare with on the same rows.
    reference_model: str | None = None
    # Largest loss against it: accuracy points, or relative growth of the RMSE.
    max_regression: NotNegative = 0.01

    def problems(self) -> Iterator[str]:
        yield from named_twice("slices", self.slices)
        yield from named_twice("metrics", self.metric_names)
        for name, gates in (("gates", self.gates), ("slice_gates", self.slice_gates)):
            if self.top_k is None and "top_k_accuracy" in gates:
                yield f"{name} names top_k_accuracy, which needs top_k, but top_k is null"

    @property
    def metric_names(self) -> list[str]:
        """The names of the user's own metrics: the names of their functions."""
        return [name.partition(":")[2] for name in self.metrics]


class PruneParams(ParamsSection):
    """A smaller network made from the trained one, for the variants `pruned` and `pruned_int8`."""

    # structured: removes whole channels; magnitude: sets single weights to zero.
    kind: Literal["structured", "magnitude"] | None = None
    # Of the channels of each layer that can spare some, or of all weights.
    sparsity: OpenFraction = 0.5
    epochs: Positive = 5  # epochs of the fine-tune
    # Learning rate at the start of the fine-tune; it falls to zero.
    learning_rate: PositiveFloat = 0.001


class GoalParams(ParamsSection):
    """The goal by which a provider's variant is chosen for the service's `auto`."""

    # Against fp32 on validation rows: accuracy points, or relative growth of the RMSE.
    max_metric_loss: NotNegative = 0.005
    prefer: Literal["fastest", "smallest"] = "fastest"  # among the variants within max_metric_loss


class ExportParams(ParamsSection):
    """The ONNX graphs to make, and the rules for choosing one."""

    DEFAULTS: ClassVar[ByChoice] = {"lightgbm": {"variants": ["fp32"]}}

    # Intended use, for the model card; null: the card says it is unknown.
    purpose: str | None = None
    # Licences of weights and raw data, for the model card and the release's bill of materials: an
    # SPDX expression, or a name. null: nobody declared one.
    license: LicenseText | None = None
    # That of the raw data.
    data_license: LicenseText | None = None
    # Version of ONNX's operators in the graphs.
    opset: Annotated[int, Field(ge=18, le=24)] = 18
    max_batch_size: Annotated[int, Field(ge=1, le=4096)] = 256  # of the graphs and the service
    # The exported graphs, always with fp32. One that gains nothing is left out, with the reason.
    variants: Annotated[list[Variant], Field(min_length=1)] = [
        "fp32",
        "fp16",
        "int8",
        "int8_dynamic",
    ]
    quantization_samples: Positive = 512  # training rows that int8 ranges are measured on
    golden_rows: Annotated[int, Field(ge=0, le=4096)] = 64  # validation rows stored in the bundle
    # Training rows of a table with which explanations compare, readable in the bundle. 0: none.
    background_rows: Annotated[int, Field(ge=0, le=1024)] = 32
    goal: GoalParams = GoalParams()

    def problems(self) -> Iterator[str]:
        if "fp32" not in self.variants:
            yield (
                f"variants {self.variants} lacks 'fp32', "
                "which the others are made from and compared with"
            )
        yield from named_twice("variants", self.variants)


class CompileParams(ParamsSection):
    """Settings of the TensorRT engine that the stage `compile` builds."""

    DEFAULTS: ClassVar[ByChoice] = {"lightgbm": {"variant": "fp32"}}

    variant: Literal["fp32", "fp16", "int8_tensorrt"] = "fp16"  # exported graph to compile
    # true: fail without a GPU or TensorRT; false: record why there is no engine.
    require: bool = False
    optimal_batch_size: Positive = 32  # tuned for; the engine takes 1 to export.max_batch_size
    workspace_mib: Positive = 1024  # scratch memory of the builder


class VerifyParams(ParamsSection):
    """Allowed differences between the backends of the certificate."""

    _BUDGETS: ClassVar[dict[Variant, float]] = {
        "fp16": 0.004,
        "int8": 0.01,
        "int8_dynamic": 0.01,
        "int8_tensorrt": 0.01,
        "pruned": 0.01,
        "pruned_int8": 0.01,
    }
    DEFAULTS: ClassVar[ByChoice] = {
        "class": {"max_metric_loss": _BUDGETS},
        "labels": {"max_metric_loss": _BUDGETS},
        "number": {"max_metric_loss": dict.fromkeys(_BUDGETS, 0.05) | {"fp16": 0.01}},
    }

    # Of outputs: torch to ONNX fp32, and ONNX to HTTP.
    max_difference: PositiveFloat = 1e-5
    # Accuracy points, or relative growth of the RMSE. A variant that is left out keeps its own.
    max_metric_loss: dict[Variant, NotNegative] = _BUDGETS
    batch_seconds: PositiveFloat = 60.0  # limit for the repetition of fp32 in each small batch size
    timing_rounds: Positive = 50  # latency is the median of this many calls


class ScriptParams(ParamsSection):
    """Limits of `slipway export edge` or `openvino`; null is no limit."""

    max_folder_mb: PositiveFloat | None = None  # size of the written files
    max_installed_mb: PositiveFloat | None = None  # size of the packages that run.py needs
    max_memory_mb: PositiveFloat | None = None  # peak memory of the process
    max_latency_ms: PositiveFloat | None = None  # median for one row, on the machine that exports
