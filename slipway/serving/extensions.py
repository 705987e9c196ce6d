"""The list of the service's extensions. Removing an entry removes its feature and nothing else.

The order of the list matters. Extensions stop in this order, gRPC first. `GET /status` shows their
parts in this order. Each ended request is reported to them in this order: tracing comes before the
access log, which writes the trace ids.
"""

from slipway.serving.access_log import extension as access_log
from slipway.serving.api_docs import extension as api_docs
from slipway.serving.auth import extension as auth
from slipway.serving.engine_rebuild import extension as engine_rebuild
from slipway.serving.explaining import extension as explaining
from slipway.serving.extension import Extension
from slipway.serving.gpu import extension as gpu
from slipway.serving.grpc_port import extension as grpc_port
from slipway.serving.monitoring import extension as monitoring
from slipway.serving.open_inference import extension as open_inference
from slipway.serving.page import extension as page
from slipway.serving.request_log import extension as request_log
from slipway.serving.rollout import extension as rollout
from slipway.serving.tracing import extension as tracing

EXTENSIONS: tuple[Extension, ...] = (
    grpc_port.EXTENSION,
    auth.EXTENSION,
    request_log.EXTENSION,
    tracing.EXTENSION,
    access_log.EXTENSION,
    monitoring.EXTENSION,
    rollout.EXTENSION,
    engine_rebuild.EXTENSION,
    gpu.EXTENSION,
    explaining.EXTENSION,
    open_inference.EXTENSION,
    page.EXTENSION,
    api_docs.EXTENSION,
)
SECTIONS = tuple(one.settings for one in EXTENSIONS if one.settings)
