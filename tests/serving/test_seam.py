"""The internals of BentoML and circus that the service relies on are unchanged."""

import inspect
import subprocess
import sys

import bentoml
import pytest
import uvicorn

from tests.serving.server import ROOT


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_used_internals_of_bentoml_are_unchanged() -> None:
    """BentoML's internals that slipway/serving/service.py uses. Check each new version."""
    from _bentoml_impl.worker import service as worker
    from _bentoml_sdk.service import Service
    from bentoml._internal.configuration.containers import BentoMLContainer

    assert bentoml.__version__ == "1.4.39"
    assert "service_class" in inspect.signature(bentoml.service).parameters
    assert list(inspect.signature(Service.to_asgi).parameters) == ["self", "is_main"]
    assert isinstance(inspect.getattr_static(Service, "doc"), property)
    assert "service.to_asgi(" in inspect.getsource(worker)
    assert (
        "http" not in inspect.signature(worker.main.callback).parameters
    )  # so uvicorn takes its protocol "auto", which is ours
    assert all(hasattr(BentoMLContainer, name) for name in ("http", "bentoml_home"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_used_internals_of_circus_are_unchanged() -> None:
    """The faults that slipway/serving/process/supervisor.py fixes until a new version does."""
    from _bentoml_impl.server import serving
    from bentoml._internal.utils import circus
    from circus.watcher import Watcher

    source = inspect.getsource(circus.create_standalone_arbiter)
    assert "else Arbiter" in source  # looked up when a server starts
    assert 'check_delay=kwargs.pop("check_delay", 10)' in source
    assert "create_standalone_arbiter(**arbiter_kwargs)" in inspect.getsource(serving.serve_http)
    assert 'endpoint=f"tcp://127.0.0.1' in source
    assert {"stop_signal", "respawn", "numprocesses"} <= set(
        inspect.signature(Watcher.__init__).parameters
    )
    assert hasattr(Watcher, "get_active_processes")
    assert all(hasattr(circus.Arbiter, name) for name in ("initialize", "manage_watchers", "stop"))


def test_the_used_internals_of_uvicorn_are_unchanged() -> None:
    """The protocol that slipway/serving/http/connections.py extends. Check each new version."""
    from uvicorn.protocols.http import httptools_impl

    assert uvicorn.__version__ == "0.54.0"
    protocol = httptools_impl.HttpToolsProtocol
    made = inspect.getsource(protocol.__init__) + inspect.getsource(protocol.connection_made)
    for name in ("cycle", "flow", "loop", "parser", "pipeline", "timeout_keep_alive", "transport"):
        assert f"self.{name}" in made, name
    callbacks = ("on_message_begin", "on_headers_complete", "on_body", "on_message_complete")
    for name in (*callbacks, "on_response_complete", "_unset_keepalive_if_required"):
        assert callable(getattr(protocol, name)), name
    cycle = inspect.getsource(httptools_impl.RequestResponseCycle)
    for name in ("more_body", "response_started", "response_complete"):
        assert f"self.{name} = " in cycle, name
    # The transport holds the head, which is written once, until the body is written.
    assert cycle.count('self.transport.write(b"".join(content))') == 2


@pytest.mark.process
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_slipways_application_is_outermost_except_behind_another_bentoml_service() -> None:
    script = """
import slipway.serving.service as service
applications = service.Slipway.to_asgi(), service.Slipway.to_asgi(is_main=False)
print(*(application.__class__.__module__ == "slipway.serving.app" for application in applications))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "False"]
