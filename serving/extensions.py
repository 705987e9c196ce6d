"""The extensions of the service. Taking one out of the list takes its feature out, and nothing else.

`GET /status` shows their parts in this order.
"""

from serving.auth import extension as auth
from serving.engine_rebuild import extension as engine_rebuild
from serving.explaining import extension as explaining
from serving.extension import Extension
from serving.gpu import extension as gpu
from serving.monitoring import extension as monitoring
from serving.open_inference import extension as open_inference
from serving.page import extension as page
from serving.request_log import extension as request_log
from serving.rollout import extension as rollout

EXTENSIONS: tuple[Extension, ...] = (
    auth.EXTENSION,
    request_log.EXTENSION,
    monitoring.EXTENSION,
    rollout.EXTENSION,
    engine_rebuild.EXTENSION,
    gpu.EXTENSION,
    explaining.EXTENSION,
    open_inference.EXTENSION,
    page.EXTENSION,
)
SECTIONS = tuple(one.settings for one in EXTENSIONS if one.settings)
