"""Replaces this process by the service of the project in the working directory."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from slipway.artifacts.bundle import MANIFEST
from slipway.serving.process.addresses import require_free
from slipway.serving.settings import Settings, SettingsError, read_settings
from slipway.system.errors import UnavailableError

ENVIRONMENT = Path("serving.env")
SERVICE = "slipway.serving.service:Slipway"


def launch(host: str, port: int, options: Sequence[str]) -> NoReturn:
    """Replace this process by `bentoml serve`, with the settings of serving.env if it exists.

    Raises SlipwayError if there is no model yet, or if the address is in use.
    """
    if ENVIRONMENT.is_file():
        for name, value in read_environment(ENVIRONMENT).items():
            os.environ.setdefault(name, value)
    require_model(read_settings())
    require_free(host, port, "Choose another with --port")
    arguments = ["-m", "bentoml", "serve", SERVICE, "--host", host, "--port", str(port), *options]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *arguments])


def read_environment(path: Path) -> dict[str, str]:
    """Read NAME=VALUE lines, as shells, systemd and containers do. Raises SettingsError."""
    found = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            words = [word for word in shlex.split(line, comments=True) if word != "export"]
        except ValueError:  # a quotation mark that does not close
            words = [""]
        for word in words:
            name, sign, value = word.partition("=")
            if not sign or not name.isidentifier():
                raise SettingsError(
                    f"{path}, line {number}: {line.strip()!r} is not a setting, expected "
                    "NAME=VALUE. Correct it, or begin a comment with #."
                )
            found[name] = value
    return found


def require_model(settings: Settings) -> None:
    """Raise UnavailableError if there is neither a bundle nor a rolled-out model."""
    if (settings.bundle / MANIFEST).is_file() or settings.state.is_dir():
        return
    raise UnavailableError(
        f"there is no model in {settings.bundle} yet, expected the bundle of a finished run. "
        "Make it with `slipway run` in the project's folder, or name another bundle with "
        "SLIPWAY_BUNDLE and SLIPWAY_CERTIFICATE."
    )
