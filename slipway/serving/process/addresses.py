"""Checks the addresses that the service listens on, before any worker starts.

Other machines may reach the service only if an extension allows remote callers. However it was
started, a worker also checks the address of each connection.
"""

import os
import socket
from collections.abc import Sequence

from slipway.serving.extension import Extension
from slipway.serving.http.callers import is_loopback
from slipway.serving.settings import Settings, SettingsError


def require_safe_start(
    settings: Settings, extensions: Sequence[Extension], host: str, port: int
) -> None:
    """Raise SlipwayError if the service must not, or cannot, listen on `host` and `port`."""
    checks = [one.allows_remote for one in extensions if one.allows_remote]
    addresses = [(host, port, "Choose another with --port")]
    if settings.admin_port:
        hint = "Choose another with SLIPWAY_ADMIN_PORT, or 0 to have all on the main port"
        addresses.append((settings.admin_host, settings.admin_port, hint))
    own = (one.address(settings) for one in extensions if one.address)
    addresses += [address for address in own if address]
    allows_remote = any(check(settings) for check in checks)
    taken: set[int] = set()
    for each_host, each_port, hint in addresses:
        if not allows_remote:
            require_loopback(each_host, has_authentication=bool(checks))
        if each_port in taken:
            raise SettingsError(f"two ports of this service are {each_port}. {hint}")
        require_free(each_host, each_port, hint)
        taken.add(each_port)


def require_loopback(host: str, *, has_authentication: bool) -> None:
    """Raise SettingsError if other machines can reach `host`."""
    if is_loopback(host):
        return
    if not has_authentication:
        raise SettingsError(
            f"{host} can be reached from other machines, and this service has no authentication: "
            "use --host 127.0.0.1"
        )
    raise SettingsError(
        f"{host} can be reached from other machines, and no API keys are configured: create one "
        "with `python -m slipway.serving.auth.keys NAME --file FILE` and set SLIPWAY_KEYS=FILE; "
        "or set SLIPWAY_DISABLE_AUTH=true to admit all who reach it; or use --host 127.0.0.1"
    )


def free_port() -> int:
    """Return a port of 127.0.0.1 that no process uses at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def require_free(host: str, port: int, hint: str) -> None:
    """Raise SettingsError if the address is in use or invalid; `hint` is the fix in the message."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        is_lookup = isinstance(error, socket.gaierror)
        reason = error.strerror if is_lookup else os.strerror(error.errno or 0)
        raise SettingsError(
            f"cannot listen on {host}:{port}: {reason}. {hint}, or end the process that uses it"
        ) from None
