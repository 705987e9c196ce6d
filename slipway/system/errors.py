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


class SlipwayError(Exception):
    """Base of all: a fault that the user can fix. Ends a command without a traceback."""


class ParamsError(SlipwayError):
    """`params.yaml` is not valid."""


class DataError(SlipwayError):
    """The raw data cannot be used."""


class ImageError(DataError):
    """One image cannot be read; `rule` is the name of the rule it breaks."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(detail)
        self.rule = rule
        self.detail = detail


class CellError(DataError):
    """One cell of a table is not allowed by its column; `rule` is the rule it breaks."""

    def __init__(self, rule: str, column: str, detail: str) -> None:
        super().__init__(f"{column}: {detail}")
        self.rule = rule
        self.column = column
        self.detail = detail


class SchemaError(SlipwayError):
    """A file between two stages does not have the declared format."""


class IntegrityError(SlipwayError):
    """Bytes do not have the recorded digest."""


class SealError(SlipwayError):
    """Params, code or data changed while a stage ran, or a record is of another run."""


class LockedError(SlipwayError):
    """Another process holds the lock that this one needs."""


class UnavailableError(SlipwayError):
    """Something requested by name is not possible here."""


class TrainingError(SlipwayError):
    """A training run failed."""


class MetricError(SlipwayError):
    """No metric is defined for these numbers."""


class GateMissedError(SlipwayError):
    """The quality gates of a model do not allow its release."""


class ParityError(SlipwayError):
    """Two backends that must agree do not."""


class BundleError(SlipwayError):
    """A bundle that is unreadable, altered or of an unknown format."""


class CertificateError(BundleError):
    """No certificate fits the bundle."""


class EngineError(SlipwayError):
    """A TensorRT engine could not be built or does not fit."""
