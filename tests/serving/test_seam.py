"""The seam with BentoML is where it was found; which imports the service may have is in tests/structure/."""

import inspect
import subprocess
import sys

import bentoml
import pytest

from tests.serving.server import ROOT


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_seam_with_bentoml_is_where_we_found_it() -> None:
    """What serving/service.py takes from BentoML beyond its documented interface; a new version has to be looked at."""
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
def test_the_seam_with_the_process_manager_is_where_we_found_it() -> None:
    """What serving/process/supervising.py mends; where a new version mended it, ours can go."""
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


@pytest.mark.process
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_our_front_is_the_outermost_application_and_absent_behind_another_service() -> None:
    script = """
import serving.service as service
applications = service.Slipway.to_asgi(), service.Slipway.to_asgi(is_main=False)
print(*(application.__module__ == "serving.http.connections" for application in applications))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "False"]
