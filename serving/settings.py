"""How the service runs: environment variables that begin with SLIPWAY_, typed and checked all at once.

An unknown SLIPWAY_ variable is refused with the one it was probably meant to be. What a model is
comes from its bundle alone; `params.yaml` is never read here. docs/serving.md explains every setting.
"""

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from slipway.system.cores import num_cores
from slipway.system.errors import SlipwayError

PREFIX = "SLIPWAY_"
ROOT = Path(__file__).resolve().parent.parent  # the project's folder, or `src` of a built bento

Provider = Literal["auto", "cpu", "cuda", "onnxruntime_tensorrt", "tensorrt"]
Variant = Literal[
    "auto", "fp32", "fp16", "int8", "int8_dynamic", "int8_tensorrt", "pruned", "pruned_int8"
]
_HOSTS = r"^([A-Za-z0-9._-]+(,[A-Za-z0-9._-]+)*)?$"
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


class Settings(BaseSettings):
    """Every setting; a relative path starts at the folder that holds `serving/`."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="forbid", validate_default=True
    )

    bundle: Path = Path("artifacts/bundle")
    certificate: Path = Path("artifacts/certificate.json")
    engine: Path = Path("artifacts/engine")
    rebuilt_engine: Path = Path("artifacts/rebuilt_engine")  # built and certified on this machine
    rebuild_engine: bool = False  # build it in the background where the engine is another machine's
    engine_cache: Path = Path(".work/engine_cache")  # of the provider onnxruntime_tensorrt
    state: Path = Path(".work/serving")  # what the service remembers: what is rolled out
    accept_draft: bool = False  # for the verify stage alone, whose HTTP hop needs a service before it can certify one
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
    keys: Path | None = None  # file of the digests of keys; unset or empty: no key is asked for
    allow_anyone: bool = False  # listen where others can reach it, without keys
    hosts: Annotated[str, Field(pattern=_HOSTS)] = (
        ""  # names it is called by without keys, with commas; addresses and localhost always are
    )
    admin_port: Annotated[int, Field(ge=0, le=65535)] = (
        0  # of what operators ask; 0: on the main port
    )
    admin_host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    drain_s: Annotated[float, Field(ge=0, le=600)] = 5.0  # from SIGTERM to the end of listening
    shadow_share: Annotated[float, Field(ge=0, le=1)] = (
        0.1  # of the requests that a candidate answers copies of
    )
    watch: bool = True  # drift, and feedback
    window_rows: Annotated[int, Field(ge=100, le=10_000_000)] = (
        1000  # that a window for drift ends with
    )
    window_minutes: Annotated[float, Field(gt=0, le=44640)] = (
        60.0  # after which it ends with fewer, if they are enough to be judged
    )
    feedback_rows: Annotated[int, Field(ge=100, le=100_000_000)] = (
        100_000  # predictions, and truths, that are remembered
    )
    feedback_days: Annotated[float, Field(gt=0, le=36500)] = 30.0  # for so long
    keep_directory: Path | None = None  # of kept requests; unset or empty: nothing is kept
    keep_share: Annotated[float, Field(ge=0, le=1)] = 1.0  # of all requests
    keep_bytes: Annotated[int, Field(ge=1 << 20)] = 1 << 30  # of the whole folder, over all workers
    keep_days: Annotated[float, Field(ge=0, le=36500)] = 0.0  # 0: as long as there is room

    @field_validator("keep_directory", "keys", mode="before")
    @classmethod
    def _empty_is_unset(cls, path: Any) -> Any:
        return path or None

    @field_validator(
        "bundle",
        "certificate",
        "engine",
        "rebuilt_engine",
        "engine_cache",
        "state",
        "keep_directory",
        "keys",
    )
    @classmethod
    def _from_the_root(cls, path: Path | None) -> Path | None:
        return ROOT / path if path else None

    def host_names(self) -> frozenset[str]:
        """The names in `hosts`, in lower case."""
        return frozenset(name for name in self.hosts.lower().split(",") if name)

    def threads_per_worker(self) -> int:
        """Threads of one worker's ONNX Runtime."""
        return self.num_threads or max(1, num_cores() // self.workers)


def read_settings(environment: Mapping[str, str] | None = None) -> Settings:
    """The settings of this process (or of `environment`); SettingsError with every mistake in it."""
    found = {
        name: value
        for name, value in (os.environ if environment is None else environment).items()
        if name.startswith(PREFIX)
    }
    known = {f"{PREFIX}{name.upper()}": name for name in Settings.model_fields}
    problems = [_unknown(name, list(known)) for name in sorted(found) if name not in known]
    values = {known[name]: value for name, value in found.items() if name in known}
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        problems += [_wrong(detail) for detail in _one_per_field(error)]
    if problems:
        raise SettingsError(
            f"{len(problems)} wrong setting{'s' * (len(problems) > 1)}, see docs/serving.md:\n  "
            + "\n  ".join(problems)
        )
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
    return list({detail["loc"][0]: detail for detail in error.errors(include_url=False)}.values())


def _wrong(detail: Any) -> str:
    return f"{PREFIX}{str(detail['loc'][0]).upper()}: found {detail['input']!r}. {detail['msg']}"
