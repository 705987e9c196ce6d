"""The result of cleaning: the same for every kind of input, with the files and notes of its own."""

from pathlib import Path

from slipway.data.images.cleaning import Cleaned
from slipway.data.rules.report import CleanReport


class CleanResult:
    """Kept and refused rows, and what a kind of input adds to them."""

    columns_yaml = "{} # this kind of input has no columns\n"

    def __init__(self, cleaned: Cleaned) -> None:
        self.cleaned = cleaned

    def report(self) -> CleanReport:
        """The record behind `reports/clean.json`."""
        raise NotImplementedError

    def write(self, folder: Path) -> None:
        """Write the files of this kind beside the rows in `folder`."""

    def notes(self, columns: Path) -> str:
        """Lines for the console; `columns` is the file with `columns_yaml`."""
        return ""

    def hint(self) -> str:
        """A likely cause if too many rows were refused."""
        return ""
