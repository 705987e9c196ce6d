"""The findings of `inspect` about a data set."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from slipway.data.sources.raw_tables import RawTable
from slipway.kinds.inputs import COLUMNS, IMAGES, TEXTS, InputKind

Form = Literal["class folders", "text folders", "table of images", "table"]


@dataclass(frozen=True)
class ImageSample:
    """Sizes and colours of some images."""

    num_read: int
    sides: tuple[int, int]  # median width and height in pixels
    same_aspect: bool  # width over height differs by at most 5 % among nine tenths of them
    has_colour: bool
    dark_range: bool  # 16-bit pixels that use few of their values
    unreadable: Mapping[str, str] = field(default_factory=dict)  # first reason by name


@dataclass(frozen=True)
class DataSummary:
    """A data set: its form, rows, columns and images. Counts may come from a sample."""

    path: Path
    form: Form
    num_rows: int
    is_exact: bool  # `num_rows` was counted, not estimated
    classes: Mapping[str, int] = field(default_factory=dict)  # rows by class folder
    given: Mapping[str, int] = field(default_factory=dict)  # rows by the split that names give
    split_file: Path | None = None  # beside the table; then `given` are its rows
    # A sample of the rows, without the image column; of text folders the texts.
    table: RawTable | None = None
    image_column: str | None = None
    images: ImageSample | None = None
    sources: tuple[str, ...] = ()  # tables of equal columns in the folder `path`
    encoding: str = "utf-8"
    sheet: str | None = None  # of a workbook, unless it is the first
    notes: tuple[str, ...] = ()  # what was sampled, and what was found odd

    @property
    def input(self) -> InputKind:
        """The kind of input that the data suits; a table may also suit a task of texts."""
        kinds = {"table": COLUMNS, "text folders": TEXTS}
        return kinds.get(self.form, IMAGES)
