"""Every error that Slipway raises on purpose.

SlipwayError                 ends a command with exit code 1 and its text, without a traceback
├── ParamsError              params.yaml: unknown key, wrong type, values that exclude each other
├── DataError                the raw data: missing column, one class only, too many bad rows
│   ├── ImageError           one image that cannot be read (has a `rule`)
│   └── CellError            one cell of a table that its column does not take (has a `rule` and a `column`)
├── SchemaError              a file between two stages is not what its reader declared
├── IntegrityError           bytes do not have the digest that was written down for them
├── SealError                inputs changed while a stage ran, or a record is not of what ran
├── LockedError              another process holds what this one needs
├── UnavailableError         asked for by name, but not possible here (device, strategy, provider)
├── TrainingError            the run itself went wrong: loss not finite, requested and actual differ
├── MetricError              numbers that cannot be measured: NaN, no rows, shapes that do not fit
├── GateMissedError          a quality gate was missed or could not be judged
├── ParityError              two hops that must agree do not
├── BundleError              a bundle that is unreadable, altered or of an unknown format
│   └── CertificateError     no certificate that fits the bundle
└── EngineError              a TensorRT engine that could not be built or does not fit

A message says what was found, what was expected and how to fix it.
"""


class SlipwayError(Exception):
    """The base: a fault the user can mend."""


class ParamsError(SlipwayError):
    """`params.yaml` is not valid."""


class DataError(SlipwayError):
    """The raw data cannot be used."""


class ImageError(DataError):
    """One image cannot be read. `rule` is the name under which it is refused."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(detail)
        self.rule = rule
        self.detail = detail


class CellError(DataError):
    """One cell of a table is not what its column takes. `rule` is the name under which its row is refused."""

    def __init__(self, rule: str, column: str, detail: str) -> None:
        super().__init__(f"{column}: {detail}")
        self.rule = rule
        self.column = column
        self.detail = detail


class SchemaError(SlipwayError):
    """A file between two stages does not have the declared form."""


class IntegrityError(SlipwayError):
    """Bytes do not have the digest that was written down for them."""


class SealError(SlipwayError):
    """Params, code or data changed while a stage ran, or a record names others than it ran with."""


class LockedError(SlipwayError):
    """Another process holds what this one needs."""


class UnavailableError(SlipwayError):
    """Something asked for by name is not possible here."""


class TrainingError(SlipwayError):
    """A training run that must not go on."""


class MetricError(SlipwayError):
    """Numbers that no metric is defined for."""


class GateMissedError(SlipwayError):
    """A model whose quality gates do not allow its release."""


class ParityError(SlipwayError):
    """Two hops that must agree do not."""


class BundleError(SlipwayError):
    """A bundle that is unreadable, altered or of an unknown format."""


class CertificateError(BundleError):
    """There is no certificate that fits the bundle."""


class EngineError(SlipwayError):
    """A TensorRT engine could not be built or does not fit."""
