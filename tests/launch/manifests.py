"""Readers and checks of the manifests in launch/, without a container engine or a cluster."""

import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from slipway.serving.app import all_routes
from slipway.serving.auth.extension import AuthSettings
from slipway.serving.http.routes import Routes
from slipway.serving.settings import PREFIX, Settings, SettingsError
from tests.serving.in_process import full_worker, read_all_settings

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "launch/kubernetes"
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "launch/compose.yaml").read_text())
UID = 1034  # BentoML's user in the image, `BENTO_UID_GID`
KEY_FILE_MODE = 0o440

Object = dict[str, Any]


def objects(folder: str) -> list[Object]:
    """The Kubernetes objects in the files of a folder, before kustomize."""
    paths = [
        path
        for path in sorted((KUBERNETES / folder).glob("*.yaml"))
        if path.name != "kustomization.yaml"
    ]
    return [content for path in paths for content in yaml.safe_load_all(path.read_text())]


def rendered(folder: str) -> list[Object]:
    """The objects as `kubectl apply --kustomize` would send them."""
    done = subprocess.run(
        ["kubectl", "kustomize", KUBERNETES / folder], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def of_kind(kind: str, found: list[Object], name: str = "slipway") -> Object:
    """Return the object of this kind and name."""
    (match,) = (one for one in found if one["kind"] == kind and one["metadata"]["name"] == name)
    return match


def pod_of(deployment: Object) -> Object:
    spec: Object = deployment["spec"]["template"]["spec"]
    return spec


def container_of(deployment: Object) -> Object:
    (container,) = pod_of(deployment)["containers"]
    found: Object = container
    return found


def settings_of(container: Object) -> Settings:
    """The service's settings from a container's environment; SettingsError if they are invalid."""
    environment = container["env"] if "env" in container else container["environment"]
    variables = (
        environment
        if isinstance(environment, dict)
        # Those from a secret have no value here.
        else {one["name"]: one["value"] for one in environment if "value" in one}
    )
    assert all(isinstance(value, str) for value in variables.values()), "a variable is not a string"
    return read_all_settings(
        {name: value for name, value in variables.items() if name.startswith(PREFIX)}
    )


@cache
def routes() -> Routes:
    """All routes of the service."""
    return all_routes(full_worker(read_all_settings({})))


def probes(container: Object) -> Iterator[tuple[str, str, int]]:
    """(name, path, port number) of each probe of a container."""
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container[name]["httpGet"]
        yield name, probe["path"], ports[probe["port"]]


def faults(deployment: Object) -> list[str]:
    """List faults that keep the service from starting, receiving requests or draining."""
    pod, container = pod_of(deployment), container_of(deployment)
    try:
        settings = settings_of(container)
    except SettingsError as error:
        return [str(error)]
    keys = settings.section(AuthSettings).keys

    def is_mounted(variable: str) -> bool:
        return _is_mounted(container, Path(_variable(container, variable)))

    def is_open(path: str) -> bool:
        return routes()[path].access == "open"

    checks: list[tuple[str, Callable[[], bool]]] = [
        (
            "Kubernetes' Service variables would be unknown settings",
            lambda: pod["enableServiceLinks"] is False,
        ),
        (
            "the service is killed before it has drained",
            lambda: _grace(pod) > settings.drain_s + settings.request_timeout_s,
        ),
        (
            "a probe uses another port than the service",
            lambda: {port for _, _, port in probes(container)} == {3000},
        ),
        (
            "the admin port is not the port of the settings",
            lambda: _port(container, "admin") == settings.admin_port,
        ),
        (
            "the admin port is not reachable from outside the pod",
            lambda: settings.admin_host == "0.0.0.0",
        ),
        ("the key file is not on a mounted volume", lambda: _is_mounted(container, keys)),
        ("the state is not on a volume", lambda: is_mounted("SLIPWAY_STATE")),
        (
            "the number of threads differs from the CPU request",
            lambda: settings.num_threads == _num_cpus(container),
        ),
        ("BENTOML_HOME is not writable", lambda: is_mounted("BENTOML_HOME")),
        (
            "a probe's path needs a key",
            lambda: all(is_open(path) for _, path, _ in probes(container)),
        ),
    ]
    return [fault for fault, is_right in checks if not is_right()]


def _grace(pod: Object) -> float:
    return float(pod["terminationGracePeriodSeconds"])


def _num_cpus(container: Object) -> int:
    return int(container["resources"]["requests"]["cpu"])


def _port(container: Object, name: str) -> int:
    return next(int(port["containerPort"]) for port in container["ports"] if port["name"] == name)


def _variable(container: Object, name: str) -> str:
    """Return the raw value, or "": settings would resolve a relative path in this checkout."""
    return next((str(one["value"]) for one in container["env"] if one["name"] == name), "")


def _is_mounted(container: Object, path: Path | None) -> bool:
    mounts = [Path(mount["mountPath"]) for mount in container["volumeMounts"]]
    return path is not None and any(path.is_relative_to(mount) for mount in mounts)
