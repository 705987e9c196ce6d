"""Errors that Slipway raises on purpose.

SlipwayError                 ends a command with exit code 1 and its text, without a traceback
├── ParamsError              params.yaml: unknown key, wrong type, values that exclude each other
├── DataError                the raw data: missing column, one class only, too many bad rows
│   ├── ImageError           one image that cannot be read (has a `rule`)
│   └── CellError            one cell that its column does not allow (has a `rule`, a `column`)
├── SchemaError              a file between two stages does not have the declared format
├── IntegrityError           bytes do not have the recorded digest
├── SealError                inputs changed while a stage ran, or a record is of another run
├── LockedError              another process holds what this one needs
├── UnavailableError         requested by name, but not possible here (device, strategy, provider)
├── TrainingError            the run itself failed: non-finite loss, requested and actual differ
├── MetricError              numbers without a metric: NaN, no rows, shapes that do not fit
├── GateMissedError          a quality gate was missed or could not be judged
├── ParityError              two backends that must agree do not
├── BundleError              a bundle that is unreadable, altered or of an unknown format
│   └── CertificateError     no certificate fits the bundle
└── EngineError              a TensorRT engine that could not be built or does not fit

A message names what was found, what was expected and how to fix it.
"""

import re
from collections.abc import Iterable

_SHARED = re.compile(r".*\.|[a-z]+_|")  # train. or slipway_
_SHARE = 3  # one wrong letter in so many
_MARKS, _WORD = re.compile(r"[_.-]"), 4  # letters of a word, at least
_LONGEST = 100  # characters of a name that is compared
_PAGE = re.compile(r"(?<![\w./-])docs/((?:explanation|how-to|reference|tutorials)/[\w-]+)\.md\b")


def linked(text: str) -> str:
    """Return a message in which each page of our docs is a URL, which has no path of the clone.

    "see docs/how-to/loop.md" becomes "see https://.../docs/how-to/loop.html".
    """
    if "docs/" not in text:
        return text
    from slipway.system.version import documentation_url  # only a message needs it

    if not (url := documentation_url()):
        return text
    return _PAGE.sub(rf"{url}/docs/\1.html", text)


class SlipwayError(Exception):
    """Base of all errors that the user can fix. It ends a command without a traceback."""

    def __str__(self) -> str:
        return linked(super().__str__())


class ParamsError(SlipwayError):
    """`params.yaml` has an unknown key, a wrong value, or values that exclude each other."""


class DataError(SlipwayError):
    """The raw data cannot be used, for example because a column is missing."""


class ImageError(DataError):
    """One image cannot be read. `rule` is the name of the rule that it breaks."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(detail)
        self.rule = rule
        self.detail = detail


class CellError(DataError):
    """One cell of a table is not allowed by its column. `rule` names the rule that it breaks."""

    def __init__(self, rule: str, column: str, detail: str) -> None:
        super().__init__(f"{column}: {detail}")
        self.rule = rule
        self.column = column
        self.detail = detail


class SchemaError(SlipwayError):
    """A file between two stages does not have the declared format."""


class IntegrityError(SlipwayError):
    """A file was altered: its bytes do not have the recorded digest."""


class SealError(SlipwayError):
    """Params, code or data changed while a stage ran, or a record is of another run."""

    def __str__(self) -> str:
        return linked(f"{super().__str__()} See docs/reference/pipeline.md#sealed-inputs.")


class LockedError(SlipwayError):
    """Another process holds a lock that this process needs."""


class UnavailableError(SlipwayError):
    """Something requested by name (device, strategy, provider) is not available here."""


class TrainingError(SlipwayError):
    """A training run failed, for example because the loss was not finite."""


class MetricError(SlipwayError):
    """A metric is not defined for its input: NaN, no rows, or shapes that do not fit."""


class GateMissedError(SlipwayError):
    """The bundle did not pass the quality gates in params.yaml, so it must not be released."""


class ParityError(SlipwayError):
    """Two backends that must agree gave different predictions for the same rows."""


class BundleError(SlipwayError):
    """A bundle that is unreadable, altered or of an unknown format."""


class CertificateError(BundleError):
    """The certificate of a bundle is missing, invalid, or of another bundle."""


class EngineError(SlipwayError):
    """A TensorRT engine could not be built or does not fit."""


def nearest(name: str, known: Iterable[str], most: int = 1) -> list[str]:
    """Return up to `most` known names of which `name` may be a misspelling, the nearest first.

    One letter in three may be missing, wrong, added or exchanged with its neighbour; the case of
    letters does not count, nor does a section or prefix that both have. A whole word of a name,
    such as blocks of num_blocks, stands for it if no name is nearer.
    """
    given, found = name.strip().lower(), list[tuple[int, int, str]]()
    for place, one in enumerate(known if len(given) <= _LONGEST else ()):
        shared = _SHARED.match(one.lower())
        start = shared.end() if shared and given.startswith(shared[0]) else 0
        short, wanted = given[start:], one.strip().lower()[start:]
        if len(short) >= _WORD and short in _MARKS.split(wanted):
            found.append((len(wanted), place, one))
            continue
        allowed = max(1, max(len(short), len(wanted)) // _SHARE)
        if abs(len(short) - len(wanted)) <= allowed:
            distance = _edits(short, wanted)
            if distance <= allowed and distance < len(short):
                found.append((distance, place, one))
    return [one for _, _, one in sorted(found)[:most]]


def _edits(one: str, other: str) -> int:
    """Return the optimal string alignment distance of two texts."""
    before: list[int] = []
    last = list(range(len(other) + 1))
    for row, letter in enumerate(one, 1):
        present = [row]
        for column, wanted in enumerate(other, 1):
            steps = [
                last[column] + 1,
                present[column - 1] + 1,
                last[column - 1] + (letter != wanted),
            ]
            if before and column > 1 and letter == other[column - 2] and one[row - 2] == wanted:
                steps.append(before[column - 2] + 1)
            present.append(min(steps))
        before, last = last, present
    return last[-1]
