"""Settings of the service: environment variables that begin with SLIPWAY_, typed and validated all at once.

Each extension declares its own settings in a SettingsSection. An unknown SLIPWAY_ variable is refused, with the name that was probably
meant; a variable of an extension that is not installed is ignored. docs/serving.md explains every setting.
"""

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from slipway.system.cores import num_cores
from slipway.system.errors import SlipwayError

PREFIX = "SLIPWAY_"
ROOT = Path(__file__).resolve().parent.parent  # the project's folder, or `src` of a built bento

Provider = Literal["auto", "cpu", "cuda", "onnxruntime_tensorrt", "tensorrt"]
Variant = Literal[
    "auto", "fp32", "fp16", "int8", "int8_dynamic", "int8_tensorrt", "pruned", "pruned_int8"
]
# What Kubernetes sets for a Service whose name begins with `slipway`, and people who look for the port.
_SERVICE_LINK = re.compile(r"SLIPWAY_(HOST|PORT|(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_\w+))")
_LINK_HINT = (
    "address and port are `bentoml serve`'s own, --host and --port, or BENTOML_HOST and BENTOML_PORT. "
    "If nobody set this one, Kubernetes did, for a Service of this name: write enableServiceLinks: false into the pod"
)
DEFAULT_BATCH_SIZE = (
    32  # of max_batch_size "auto": more than the queue usually holds, and quick to warm up
)


class SettingsError(SlipwayError):
    """One or more SLIPWAY_ variables are not valid."""


# A relative path starts at ROOT; an empty one is unset.
RootedPath = Annotated[Path, AfterValidator(lambda path: ROOT / path)]
OptionalPath = Annotated[RootedPath | None, BeforeValidator(lambda path: path or None)]
# The variables of every extension. Those of one that is not installed are ignored.
EXTENSION_VARIABLES = frozenset(
    ("rebuild_engine", "keys", "allow_anyone", "hosts", "shadow_share", "watch", "window_rows", "window_minutes", "feedback_rows", "feedback_days",
     "keep_directory", "keep_share", "keep_bytes", "keep_days")
)  # fmt: skip


class SettingsSection(BaseSettings):
    """The settings of one extension."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="forbid", validate_default=True
    )


AnySection = TypeVar("AnySection", bound=SettingsSection)


class Settings(SettingsSection):
    """The settings that the service itself needs, and the sections of its extensions."""

    bundle: RootedPath = Path("artifacts/bundle")
    certificate: RootedPath = Path("artifacts/certificate.json")
    engine: RootedPath = Path("artifacts/engine")
    rebuilt_engine: RootedPath = Path("artifacts/rebuilt_engine")  # built and certified here
    engine_cache: RootedPath = Path(".work/engine_cache")  # of the provider onnxruntime_tensorrt
    state: RootedPath = Path(".work/serving")  # survives a restart: rollout, monitoring
    accept_draft: bool = False  # only for the verify stage, which certifies a running service
    provider: Provider = "auto"
    variant: Variant = "auto"
    num_threads: Annotated[int, Field(ge=0, le=1024)] = (
        0  # of ONNX Runtime, per worker; 0 shares the cores among the workers
    )
    workers: Annotated[int, Field(ge=1, le=256)] = 1
    max_body_bytes: Annotated[int, Field(ge=1, le=1 << 30)] = 16 << 20
    max_items: Annotated[int, Field(ge=1, le=4096)] = 64  # images in one request
    max_rows: Annotated[int, Field(ge=1, le=65536)] = 1024  # of a table, in one request
    max_batch_size: Literal["auto"] | Annotated[int, Field(ge=1, le=4096)] = "auto"
    max_queue: Annotated[int, Field(ge=1, le=65536)] = (
        256  # requests in decoding, waiting and running, per worker
    )
    max_wait_s: Annotated[float, Field(gt=0, le=600)] = (
        1.0  # of work that a burst may leave in the queue
    )
    max_connections: Annotated[int, Field(ge=1, le=1 << 20)] = (
        512  # per worker; each takes a file descriptor
    )
    request_timeout_s: Annotated[float, Field(gt=0, le=600)] = 10.0
    admin_port: Annotated[int, Field(ge=0, le=65535)] = (
        0  # for the routes of operators; 0: they are on the main port
    )
    admin_host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    drain_s: Annotated[float, Field(ge=0, le=600)] = 5.0  # from SIGTERM to the end of listening
    sections: tuple[SettingsSection, ...] = ()  # not a variable; see `section`

    def section(self, kind: type[AnySection]) -> AnySection:
        """The settings of an extension; the defaults if they were not read."""
        found = (one for one in self.sections if isinstance(one, kind))
        return next(found, None) or kind()

    def paths(self) -> Iterator[Path]:
        """Every path that is set, those of extensions included."""
        for section in (self, *self.sections):
            yield from (value for value in vars(section).values() if isinstance(value, Path))

    def threads_per_worker(self) -> int:
        """Threads of one worker's ONNX Runtime."""
        return self.num_threads or max(1, num_cores() // self.workers)


def variables_of(kind: type[SettingsSection]) -> dict[str, str]:
    """Environment variable -> field, for each setting of a section."""
    return {f"{PREFIX}{name.upper()}": name for name in kind.model_fields if name != "sections"}


def read_settings(
    sections: Sequence[type[SettingsSection]] = (), environment: Mapping[str, str] | None = None
) -> Settings:
    """Read the settings of this process (or of `environment`). Raises SettingsError that lists every mistake."""
    found = {
        name: value
        for name, value in (os.environ if environment is None else environment).items()
        if name.startswith(PREFIX)
    }
    ignored = {f"{PREFIX}{name.upper()}" for name in EXTENSION_VARIABLES}
    kinds: list[type[SettingsSection]] = [*sections, Settings]
    known = [name for kind in kinds for name in variables_of(kind)]
    problems = [
        _unknown(name, known) for name in sorted(found) if name not in known and name not in ignored
    ]
    read: list[SettingsSection] = []
    for kind in kinds:
        values: dict[str, Any] = {
            field: found[name] for name, field in variables_of(kind).items() if name in found
        }
        if kind is Settings:
            values["sections"] = tuple(read)
        try:
            read.append(kind.model_validate(values))
        except ValidationError as error:
            problems += [_wrong(detail) for detail in _one_per_field(error)]
    if problems:
        raise SettingsError(
            f"{len(problems)} wrong setting{'s' * (len(problems) > 1)}, see docs/serving.md:\n  "
            + "\n  ".join(problems)
        )
    *_, settings = read
    assert isinstance(settings, Settings)
    return settings


def _unknown(name: str, known: list[str]) -> str:
    if _SERVICE_LINK.fullmatch(name):
        return f"{name}: unknown setting; {_LINK_HINT}"
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"{name}: unknown setting; " + (
        f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
    )


def _one_per_field(error: ValidationError) -> list[Any]:
    """A union reports each of its branches; the last is the one whose text helps."""
    details = [detail for detail in error.errors(include_url=False) if detail["loc"]]
    return list({detail["loc"][0]: detail for detail in details}.values())


def _wrong(detail: Any) -> str:
    return f"{PREFIX}{str(detail['loc'][0]).upper()}: found {detail['input']!r}. {detail['msg']}"
