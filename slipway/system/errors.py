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
    """Base of all errors that the user can fix. It ends a command without a traceback."""


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
        return f"{super().__str__()} See docs/reference/pipeline.md#sealed-inputs."


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
