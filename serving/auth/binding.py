"""What the service may listen on: where other machines can reach it, callers need keys, or the operator says that they do not.

The server process checks before any worker starts; a worker looks at each connection's own address as well, however it was started.
"""

import ipaddress
import os
import socket

from serving.auth.keys import read_keys
from serving.settings import Settings, SettingsError


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach an address; a name that is not `localhost` counts as reachable by others."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address == "localhost"
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def is_guarded(settings: Settings) -> bool:
    """Whether the service may be reached from elsewhere."""
    return settings.keys is not None or settings.allow_anyone


def require_safe_start(settings: Settings, host: str, port: int) -> None:
    """SlipwayError, in one line, if the service must not or cannot listen on `host` and `port` with these settings."""
    if settings.keys:
        read_keys(settings.keys)
    require_guarded(settings, host)
    require_free(host, port, "Choose another with --port")
    if not settings.admin_port:
        return
    if settings.admin_port == port:
        raise SettingsError(
            f"SLIPWAY_ADMIN_PORT is {port}, the main port. Choose another, or 0 to have all on one port"
        )
    require_guarded(settings, settings.admin_host)
    require_free(settings.admin_host, settings.admin_port, "Choose another with SLIPWAY_ADMIN_PORT")


def require_guarded(settings: Settings, host: str) -> None:
    """SettingsError if others could call at `host` whom nobody has allowed to."""
    if not is_loopback(host) and not is_guarded(settings):
        raise SettingsError(
            f"{host} can be reached from other machines, and there are no keys: make one with `python -m serving.auth.keys NAME "
            "--file FILE` and set SLIPWAY_KEYS=FILE; or SLIPWAY_ALLOW_ANYONE=true, if everybody who reaches it may call it; or use --host "
            "127.0.0.1"
        )


def require_free(host: str, port: int, hint: str) -> None:
    """SettingsError in one line if nothing can listen there; `hint` says how to choose another port."""
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
