"""Runs the gateway for the models in a file, until a signal ends it."""

import logging
from importlib.util import find_spec
from pathlib import Path

import uvicorn

from slipway.serving.auth.extension import AuthSettings
from slipway.serving.gateway.model_process import ModelProcess
from slipway.serving.gateway.models_file import read_models
from slipway.serving.gateway.proxy import Gateway
from slipway.serving.http.callers import LoopbackOnly, is_loopback
from slipway.serving.http.connections import ConnectionLimits
from slipway.serving.http.refusal_log import Peer
from slipway.serving.http.responses import Refusal, Response, error_response
from slipway.serving.process.addresses import require_free, require_loopback
from slipway.serving.settings import SettingsError

_GRPC_PACKAGES = ("grpc", "grpc_health", "grpc_reflection", "tritonclient")
_MAX_CONNECTIONS = 4096
_HEAD_TIMEOUT_S, _IDLE_TIMEOUT_S = 10.0, 75


def serve_models(path: Path, host: str, port: int, grpc_port: int = 0) -> None:
    """Serve the models of a file at `host` and `port`, and over gRPC at `grpc_port` if it is not 0.

    Raises SettingsError for a wrong file, missing packages of gRPC, an address in use, or one that
    other machines can reach while a model has no API keys.
    """
    models = read_models(path)
    for model in models:
        if not model.allows_remote:
            require_loopback(host, has_authentication=True)
    require_free(host, port, "Choose another with --port")
    if grpc_port:
        if not all(map(find_spec, _GRPC_PACKAGES)):
            raise SettingsError(
                f"--grpc-port is {grpc_port}, but the packages of gRPC are missing. "
                "Install them: pip install 'slipway-ml[grpc]'"
            )
        if grpc_port == port:
            raise SettingsError(f"--port and --grpc-port are both {port}. Choose another.")
        require_free(host, grpc_port, "Choose another with --grpc-port")
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO)
    names = (model.settings.section(AuthSettings).host_names() for model in models)
    check = LoopbackOnly(frozenset().union(*names)) if is_loopback(host) else None
    services = [ModelProcess(model, has_grpc=bool(grpc_port)) for model in models]
    gateway = Gateway(services, check, (host, grpc_port) if grpc_port else None)
    limits = ConnectionLimits(_MAX_CONNECTIONS, _HEAD_TIMEOUT_S, _IDLE_TIMEOUT_S, _refuse)
    uvicorn.run(
        gateway,
        host=host,
        port=port,
        http=limits,  # type: ignore[arg-type]  # a factory is enough
        ws="none",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=_IDLE_TIMEOUT_S,
    )


def _refuse(refusal: Refusal, request_id: str, peer: Peer, path: str) -> Response:
    return error_response(refusal, request_id)
