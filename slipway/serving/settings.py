"""Reads the service's settings, the environment variables SLIPWAY_*, and validates them.

Each extension declares its own settings in a SettingsSection. An unknown SLIPWAY_ variable is
refused, with the most similar name; a variable of an extension that is not installed is ignored.
docs/reference/serving.md explains every setting.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from slipway.predictor.options import ModelOptions, ProviderOption, Variant
from slipway.system.cores import num_cores
from slipway.system.errors import SlipwayError, nearest

PREFIX = "SLIPWAY_"
# The project, where a command starts. BentoML imports the service in the `src` of a built bento.
ROOT = Path.cwd()

_MODEL_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")
# Set by Kubernetes for a Service whose name begins with `slipway`, or by users who want a port.
_SERVICE_LINK = re.compile(r"SLIPWAY_(HOST|PORT|(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_\w+))")
_LINK_HINT = (
    "set address and port with --host and --port, or BENTOML_HOST and BENTOML_PORT. "
    "Kubernetes sets this variable for a Service of this name: set enableServiceLinks: false in "
    "the pod"
)
_PASSWORD = re.compile(r"(?<=:)[^:/@]+(?=@)|(?<=password=)[^\s&']+")


class SettingsError(SlipwayError):
    """One or more SLIPWAY_ variables are not valid."""


# Relative paths start at ROOT; an empty one is unset.
RootedPath = Annotated[Path, AfterValidator(lambda path: ROOT / path)]
OptionalPath = Annotated[RootedPath | None, BeforeValidator(lambda path: path or None)]


def _parts(value: Any) -> Any:
    return [part for part in value.split(",") if part] if isinstance(value, str) else value


# A list of paths, separated by commas and not written as JSON.
RootedPaths = Annotated[tuple[RootedPath, ...], NoDecode, BeforeValidator(_parts)]
# The variables of every extension. Those of one that is not installed are ignored.
EXTENSION_VARIABLES = frozenset(
    {
        "access_log_bytes",
        "access_log_days",
        "access_log_directory",
        "access_log_sampling_rate",
        "allowed_hosts",
        "database_url",
        "disable_auth",
        "feedback_days",
        "feedback_rows",
        "grpc_host",
        "grpc_port",
        "keys",
        "monitoring",
        "rebuild_engine",
        "request_log_bytes",
        "request_log_days",
        "request_log_directory",
        "request_log_sampling_rate",
        "shadow_fraction",
        "tracing_endpoint",
        "tracing_max_per_second",
        "tracing_sampling_rate",
        "window_minutes",
        "window_rows",
    }
)


class SettingsSection(BaseSettings):
    """Base class of settings: each field is an environment variable SLIPWAY_NAME."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="forbid", validate_default=True
    )


def checked_model_name(name: str) -> str:
    """Return `name` if it can be a part of a URL without escapes; else raise ValueError."""
    if not _MODEL_NAME.fullmatch(name) or name == "stats":
        raise ValueError(
            f"{name!r} is no name of a model, expected letters, digits, `.`, `_` and `-`, at most "
            "64 of them, with a letter or digit at both ends; `stats` is an address of the protocol"
        )
    return name


AnySection = TypeVar("AnySection", bound=SettingsSection)


class Settings(SettingsSection):
    """The settings of the core; `sections` has those of the extensions."""

    bundle: RootedPath = Path("artifacts/bundle")
    certificate: RootedPath = Path("artifacts/certificate.json")
    engine: RootedPath = Path("artifacts/engine")
    rebuilt_engine: RootedPath = Path("artifacts/rebuilt_engine")  # for an engine built here
    engine_cache: RootedPath = Path(".work/engine_cache")  # of ONNX Runtime's TensorRT provider
    # Name of the model in the Open Inference Protocol.
    model_name: Annotated[str, AfterValidator(checked_model_name)] = "slipway"
    state: RootedPath = Path(".work/serving")  # state that survives a restart: rollout, monitoring
    # Files of public keys, one of which must have signed the bundle. Empty: it needs no signature.
    signers: RootedPaths = ()
    signer_list: OptionalPath = None  # lists keys that expire or were revoked; read at each load
    accept_draft: bool = False  # only for the verify stage, which certifies a running service
    provider: ProviderOption = "auto"
    variant: Variant = "auto"
    # ONNX Runtime's threads in each worker. 0 divides the cores among the workers.
    num_threads: Annotated[int, Field(ge=0, le=1024)] = 0
    workers: Annotated[int, Field(ge=1, le=256)] = 1
    max_body_bytes: Annotated[int, Field(ge=1, le=1 << 30)] = 16 << 20
    max_items: Annotated[int, Field(ge=1, le=4096)] = 64  # most images in one request
    max_rows: Annotated[int, Field(ge=1, le=65536)] = 1024  # most table rows in one request
    max_batch_size: Literal["auto"] | Annotated[int, Field(ge=1, le=4096)] = "auto"
    # Most requests of one worker that are being decoded, waiting or running.
    max_queue: Annotated[int, Field(ge=1, le=65536)] = 256
    # Most seconds of work in the queue after a burst.
    max_wait_s: Annotated[float, Field(gt=0, le=600)] = 1.0
    # Most connections of one worker. Each takes a file descriptor.
    max_connections: Annotated[int, Field(ge=1, le=1 << 20)] = 512
    request_timeout_s: Annotated[float, Field(gt=0, le=600)] = 10.0
    idle_timeout_s: Annotated[int, Field(ge=1, le=3600)] = 75  # longer than proxies in front
    # Port for the routes of operators. 0: they are on the main port.
    admin_port: Annotated[int, Field(ge=0, le=65535)] = 0
    admin_host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    drain_s: Annotated[float, Field(ge=0, le=600)] = 5.0  # from SIGTERM to the end of listening
    sections: tuple[SettingsSection, ...] = ()  # not a variable; see `section`

    def section(self, kind: type[AnySection]) -> AnySection:
        """Return an extension's settings, of class `kind`; the defaults if they were not read."""
        found = (one for one in self.sections if isinstance(one, kind))
        return next(found, None) or kind()

    def paths(self) -> Iterator[Path]:
        """Yield all paths in the settings, those of extensions included."""
        for section in (self, *self.sections):
            yield from (value for value in vars(section).values() if isinstance(value, Path))

    def threads_per_worker(self) -> int:
        """Return the number of ONNX Runtime threads of one worker."""
        return self.num_threads or max(1, num_cores() // self.workers)

    def model_options(self) -> ModelOptions:
        """Return the settings for loading a model: paths, runtime, threads and signers."""
        return ModelOptions(
            bundle=self.bundle,
            certificate=self.certificate,
            engine=self.engine,
            rebuilt_engine=self.rebuilt_engine,
            engine_cache=self.engine_cache,
            num_threads=self.threads_per_worker(),
            may_use_one_thread=self.num_threads == 0,
            provider=self.provider,
            variant=self.variant,
            max_batch_size=self.max_batch_size,
            accept_draft=self.accept_draft,
            signers=self.signers,
            signer_list=self.signer_list,
        )


def variables_of(kind: type[SettingsSection]) -> dict[str, str]:
    """Return the names of a section's fields by their environment variables."""
    return {f"{PREFIX}{name.upper()}": name for name in kind.model_fields if name != "sections"}


def read_settings(
    sections: Sequence[type[SettingsSection]] = (), environment: Mapping[str, str] | None = None
) -> Settings:
    """Read the settings of this process (or of `environment`).

    Raises SettingsError, which lists every mistake.
    """
    environment = os.environ if environment is None else environment
    found = {name: value for name, value in environment.items() if name.startswith(PREFIX)}
    ignored = {f"{PREFIX}{name.upper()}" for name in EXTENSION_VARIABLES}
    kinds: list[type[SettingsSection]] = [*sections, Settings]
    known = [name for kind in kinds for name in variables_of(kind)]
    unknown = sorted(set(found) - set(known) - ignored)
    problems = [_unknown(name, known) for name in unknown]
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
            f"{len(problems)} wrong setting{'s' * (len(problems) > 1)}, "
            "see docs/reference/serving.md:\n  " + "\n  ".join(problems)
        )
    *_, settings = read
    assert isinstance(settings, Settings)
    return settings


def _unknown(name: str, known: list[str]) -> str:
    if _SERVICE_LINK.fullmatch(name):
        return f"{name}: unknown setting; {_LINK_HINT}"
    close = nearest(name, known)
    hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
    return f"{name}: unknown setting; {hint}"


def _one_per_field(error: ValidationError) -> list[Any]:
    """Return one pydantic error for each field.

    A field of several types has an error for each type, of which the last one is the most helpful.
    """
    details = [detail for detail in error.errors(include_url=False) if detail["loc"]]
    return list({detail["loc"][0]: detail for detail in details}.values())


def _wrong(detail: Any) -> str:
    found = _PASSWORD.sub("***", repr(detail["input"]))
    return f"{PREFIX}{str(detail['loc'][0]).upper()}: found {found}. {detail['msg']}"


# Two parts or more: `/predict` and all below `/v2` are addresses of the service.
_ABSOLUTE_PATH = re.compile(
    r"""(?<![^\s'"`(\[{<=:,;])/(?!v2/)(?:[^\s/'"`()\[\]{}<>:;,]+/)+([^\s/'"`()\[\]{}<>:;,]*)"""
)
_END_OF_NAME = r"(?![\w.-]*\w)"


def redact_paths(content: Any, settings: Settings) -> Any:
    """Shorten file paths in a text, or in all texts of a JSON value.

    Callers must not learn about the server's file system. Paths below ROOT become relative, all
    others are cut to their last part. Keys of JSON objects stay unchanged.
    """
    if isinstance(content, dict):
        return {key: redact_paths(value, settings) for key, value in content.items()}
    if isinstance(content, list):
        return [redact_paths(value, settings) for value in content]
    if not isinstance(content, str) or "/" not in content:
        return content
    text = content.replace(f"{ROOT}/", "")
    text = re.sub(re.escape(str(ROOT)) + _END_OF_NAME, "the service's folder", text)
    # Configured paths first: they may contain spaces, which the pattern does not find.
    for path in sorted(settings.paths(), key=lambda path: -len(str(path))):
        if path.name:
            text = text.replace(str(path), f"…/{path.name}")
    return _ABSOLUTE_PATH.sub(r"…/\1", text)
