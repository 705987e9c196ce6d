"""Addresses that the service may listen on. Other machines may reach it only if an extension allows remote callers.

The server process checks before any worker starts. A worker checks each connection's address too, however it was started.
"""

import os
import socket
from collections.abc import Sequence

from serving.extension import Extension
from serving.http.callers import is_loopback
from serving.settings import Settings, SettingsError


def require_safe_start(
    settings: Settings, extensions: Sequence[Extension], host: str, port: int
) -> None:
    """Raise SlipwayError, in one line, if the service must not or cannot listen on `host` and `port`."""
    checks = [one.allows_remote for one in extensions if one.allows_remote]
    allows_remote = any(check(settings) for check in checks)
    hosts = [host, *([settings.admin_host] if settings.admin_port else [])]
    if not allows_remote:
        for reached in hosts:
            require_loopback(reached, has_authentication=bool(checks))
    require_free(host, port, "Choose another with --port")
    if not settings.admin_port:
        return
    if settings.admin_port == port:
        raise SettingsError(
            f"SLIPWAY_ADMIN_PORT is {port}, the main port. Choose another, or 0 to have all on one port"
        )
    require_free(settings.admin_host, settings.admin_port, "Choose another with SLIPWAY_ADMIN_PORT")


def require_loopback(host: str, *, has_authentication: bool) -> None:
    """Raise SettingsError if other machines can reach `host`."""
    if is_loopback(host):
        return
    if not has_authentication:
        raise SettingsError(
            f"{host} can be reached from other machines, and this service has no authentication: use --host 127.0.0.1"
        )
    raise SettingsError(
        f"{host} can be reached from other machines, and there are no keys: make one with `python -m serving.auth.keys NAME "
        "--file FILE` and set SLIPWAY_KEYS=FILE; or SLIPWAY_ALLOW_ANYONE=true, if everybody who reaches it may call it; or use --host "
        "127.0.0.1"
    )


def require_free(host: str, port: int, hint: str) -> None:
    """Raise SettingsError, in one line, if nothing can listen there; `hint` says how to choose another port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        reason = (
            error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        )
        raise SettingsError(
            f"cannot listen on {host}:{port}: {reason}. {hint}, or end the process that has it"
        ) from None
