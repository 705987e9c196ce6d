"""The compose file matches the settings of the service, Prometheus and Grafana."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipway.serving.auth.extension import AuthSettings
from slipway.serving.settings import SettingsError
from tests.launch.manifests import COMPOSE, ROOT, UID, Object, routes, settings_of

SERVICES: dict[str, Object] = COMPOSE["services"]


def faults(compose: Object) -> list[str]:
    """List faults that keep the service from starting, receiving requests or draining."""
    service = compose["services"]["slipway"]
    try:
        settings = settings_of(service)
    except SettingsError as error:
        return [str(error)]
    mounts = [Path(volume.split(":")[1]) for volume in service["volumes"]]
    scratch = [Path(mount.split(":")[0]) for mount in service["tmpfs"]]
    path, port = re.fullmatch(
        r"http://127\.0\.0\.1:(\d+)(/\w+)", service["healthcheck"]["test"][-1]
    ).group(2, 1)  # type: ignore[union-attr] # a test failure if it is not a URL
    checks = [
        (
            "the service is killed before it has drained",
            seconds(service["stop_grace_period"]) > settings.drain_s + settings.request_timeout_s,
        ),
        (
            "the key file is not a mounted secret",
            str(settings.section(AuthSettings).keys)
            in {f"/run/secrets/{name}" for name in service["secrets"]},
        ),
        (
            "the state is not on a volume",
            any(settings.state.is_relative_to(mount) for mount in mounts),
        ),
        (
            "BENTOML_HOME is not writable",
            any(
                Path(service["environment"]["BENTOML_HOME"]).is_relative_to(mount)
                for mount in scratch
            ),
        ),
        ("Prometheus does not reach the admin port", settings.admin_host == "0.0.0.0"),
        ("Prometheus scrapes another port", scrape_target() == f"slipway:{settings.admin_port}"),
        (
            "the admin port is published",
            not any(f":{settings.admin_port}" in port for port in service["ports"]),
        ),
        ("the health check needs a key", routes()[path].access == "open" and port == "3000"),
        (
            "the number of threads differs from the CPU limit",
            settings.num_threads == float(service["deploy"]["resources"]["limits"]["cpus"]),
        ),
    ]
    return [fault for fault, is_right in checks if not is_right]


def seconds(text: str) -> float:
    assert text.endswith("s")
    return float(text[:-1])


def scrape_target() -> str:
    (job,) = yaml.safe_load((ROOT / "monitoring/prometheus.secured.yml").read_text())[
        "scrape_configs"
    ]
    (target,) = job["static_configs"][0]["targets"]
    return str(target)


def test_the_compose_file_matches_the_settings_and_routes_of_the_service() -> None:
    assert faults(COMPOSE) == []


def set_variable(name: str, value: str) -> Callable[[Object], None]:
    return lambda compose: compose["services"]["slipway"]["environment"].update({name: value})


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (set_variable("SLIPWAY_DRIAN_S", "1"), "did you mean SLIPWAY_DRAIN_S"),
        (set_variable("SLIPWAY_REQUEST_TIMEOUT_S", "60"), "killed before it has drained"),
        (
            set_variable("SLIPWAY_KEYS", "/run/secrets/other"),
            "the key file is not a mounted secret",
        ),
        (set_variable("SLIPWAY_STATE", "/state"), "the state is not on a volume"),
        (set_variable("SLIPWAY_ADMIN_PORT", "3009"), "Prometheus scrapes another port"),
        (set_variable("SLIPWAY_ADMIN_HOST", "127.0.0.1"), "does not reach"),
        (set_variable("SLIPWAY_NUM_THREADS", "8"), "the number of threads differs"),
        (set_variable("BENTOML_HOME", "/home/bentoml"), "BENTOML_HOME is not writable"),
        (
            lambda compose: compose["services"]["slipway"]["ports"].append("3001:3001"),
            "is published",
        ),
        (
            lambda compose: compose["services"]["slipway"]["healthcheck"]["test"].append(
                "http://127.0.0.1:3000/metrics"
            ),
            "needs a key",
        ),
    ],
)
def test_each_fault_of_the_compose_file_is_detected(
    spoil: Callable[[Object], None], fault: str
) -> None:
    compose = copy.deepcopy(COMPOSE)
    spoil(compose)
    (found,) = faults(compose)
    assert fault in found


def test_every_secret_and_volume_is_declared_and_used() -> None:
    used = {name for service in SERVICES.values() for name in service.get("secrets", [])}
    assert used == set(COMPOSE["secrets"])
    volumes = {
        volume.split(":")[0] for service in SERVICES.values() for volume in service["volumes"]
    }
    assert {volume for volume in volumes if not volume.startswith(".")} == set(COMPOSE["volumes"])


def test_every_mounted_file_exists_and_is_read_only() -> None:
    mounted = [
        volume.split(":")
        for service in SERVICES.values()
        for volume in service["volumes"]
        if volume.startswith(".")
    ]
    assert len(mounted) == 4
    for source, _, mode in mounted:
        assert (ROOT / "launch" / source).exists(), source
        assert mode == "ro"


def test_secrets_are_files_that_git_ignores() -> None:
    assert {Path(secret["file"]).parts[0] for secret in COMPOSE["secrets"].values()} == {"secrets"}
    assert "/launch/secrets/" in (ROOT / ".gitignore").read_text().splitlines()


def test_no_port_is_published_to_other_machines() -> None:
    ports = [port for service in SERVICES.values() for port in service["ports"]]
    assert len(ports) == 3
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_every_container_is_limited_unprivileged_read_only_and_rotates_logs() -> None:
    for name, service in SERVICES.items():
        assert set(service["deploy"]["resources"]["limits"]) >= {"cpus", "memory"}, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not re.search(r":latest$", service["image"]), name
        assert service["read_only"] is True, name
        assert service["logging"]["driver"] == "json-file", name
        assert set(service["logging"]["options"]) == {"max-size", "max-file"}, name
    assert SERVICES["slipway"]["user"] == f"{UID}:{UID}"


def test_nobody_changes_dashboards_and_the_data_source_in_grafana() -> None:
    provisioning = ROOT / "monitoring/grafana/provisioning"
    (provider,) = yaml.safe_load((provisioning / "dashboards/slipway.yml").read_text())["providers"]
    assert (provider["allowUiUpdates"], provider["disableDeletion"]) == (False, True)
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())[
        "datasources"
    ]
    assert source["editable"] is False


def test_prometheus_reads_the_rules_and_the_key_from_their_mount_paths() -> None:
    configuration: dict[str, Any] = yaml.safe_load(
        (ROOT / "monitoring/prometheus.secured.yml").read_text()
    )
    mounted = dict(volume.split(":")[:2] for volume in SERVICES["prometheus"]["volumes"])
    assert mounted["../monitoring/prometheus.secured.yml"] in "".join(
        SERVICES["prometheus"]["command"]
    )
    assert (
        Path(mounted["../monitoring/rules"]).name
        == Path(configuration["rule_files"][0]).parent.name
    )
    key = Path(configuration["scrape_configs"][0]["authorization"]["credentials_file"])
    assert key.parent == Path("/run/secrets")
    assert key.name in SERVICES["prometheus"]["secrets"]
