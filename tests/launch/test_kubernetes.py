"""The Kubernetes manifests: what they say of the service is so, by the service's own settings, ports and routes."""

import copy
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from tests.launch.manifests import (
    KEY_FILE_MODE,
    KUBERNETES,
    ROOT,
    UID,
    Object,
    container_of,
    faults,
    objects,
    of_kind,
    pod_of,
    rendered,
    settings_of,
)
from tests.monitoring.queries import RULES

BASE = objects("base")
DEPLOYMENT = of_kind("Deployment", BASE)
POD = pod_of(DEPLOYMENT)
CONTAINER = container_of(DEPLOYMENT)
LABELS = {"app.kubernetes.io/name": "slipway"}
needs_kustomize = pytest.mark.skipif(
    shutil.which("kubectl") is None,
    reason="kubectl, which renders with kustomize, is not installed",
)


def test_what_the_deployment_says_of_the_service_is_so() -> None:
    assert faults(DEPLOYMENT) == []


def variable(name: str, value: str) -> Callable[[Object], None]:
    def change(deployment: Object) -> None:
        environment = container_of(deployment)["env"]
        environment[:] = [one for one in environment if one["name"] != name] + [
            {"name": name, "value": value}
        ]

    return change


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (variable("SLIPWAY_ADMIN_PRT", "3001"), "did you mean SLIPWAY_ADMIN_PORT"),
        (variable("SLIPWAY_ADMIN_PORT", "3002"), "the operators' port is not the one"),
        (variable("SLIPWAY_ADMIN_HOST", "127.0.0.1"), "nobody outside the pod"),
        (variable("SLIPWAY_DRAIN_S", "40"), "killed before it has drained"),
        (variable("SLIPWAY_KEYS", "/etc/keys"), "the keys are not where they are mounted"),
        (variable("SLIPWAY_STATE", ".work/serving"), "the state is not on a volume"),
        (variable("SLIPWAY_NUM_THREADS", "0"), "other threads"),
        (variable("BENTOML_HOME", "/home/bentoml"), "BENTOML_HOME is not writable"),
        (
            lambda deployment: pod_of(deployment).update(enableServiceLinks=True),
            "would be unknown settings",
        ),
        (
            lambda deployment: container_of(deployment)["readinessProbe"]["httpGet"].update(
                path="/metrics"
            ),
            "needs a key",
        ),
        (
            lambda deployment: container_of(deployment)["livenessProbe"]["httpGet"].update(
                port="admin"
            ),
            "a port of a probe",
        ),
    ],
)
def test_a_deployment_that_is_wrong_would_be_seen(
    spoil: Callable[[Object], None], fault: str
) -> None:
    deployment = copy.deepcopy(DEPLOYMENT)
    spoil(deployment)
    (found,) = faults(deployment)
    assert fault in found


def test_the_pod_may_do_nothing_but_serve() -> None:
    assert POD["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": UID,
        "runAsGroup": UID,
        "fsGroup": UID,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert CONTAINER["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert POD["automountServiceAccountToken"] is False
    assert "memory" in CONTAINER["resources"]["limits"]


def test_alive_is_not_ready() -> None:
    """A refused model is no reason to start the process again; a pod without one gets no requests."""
    paths = {
        name: CONTAINER[name]["httpGet"]["path"]
        for name in ("startupProbe", "readinessProbe", "livenessProbe")
    }
    assert paths == {
        "startupProbe": "/livez",
        "readinessProbe": "/readyz",
        "livenessProbe": "/livez",
    }


def test_every_volume_is_mounted_and_keys_are_for_the_service_alone() -> None:
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    assert set(volumes) == {mount["name"] for mount in CONTAINER["volumeMounts"]}
    assert volumes["keys"]["secret"] == {"secretName": "slipway-keys", "defaultMode": KEY_FILE_MODE}
    assert all(
        "sizeLimit" in volume["emptyDir"] for volume in volumes.values() if "emptyDir" in volume
    )


def test_whatever_selects_the_pods_finds_them() -> None:
    template = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    selectors = [
        DEPLOYMENT["spec"]["selector"]["matchLabels"],
        of_kind("Service", BASE)["spec"]["selector"],
        of_kind("Service", BASE, "slipway-admin")["spec"]["selector"],
        of_kind("PodDisruptionBudget", BASE)["spec"]["selector"]["matchLabels"],
        of_kind("NetworkPolicy", BASE)["spec"]["podSelector"]["matchLabels"],
        POD["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"],
    ]
    assert template == LABELS
    assert selectors == [LABELS] * len(selectors)
    target = of_kind("HorizontalPodAutoscaler", BASE)["spec"]["scaleTargetRef"]
    assert target == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "slipway"}


def test_every_named_port_is_one_of_the_containers() -> None:
    names = {port["name"] for port in CONTAINER["ports"]}
    services = [of_kind("Service", BASE), of_kind("Service", BASE, "slipway-admin")]
    policy = of_kind("NetworkPolicy", BASE)["spec"]
    asked = {port["targetPort"] for service in services for port in service["spec"]["ports"]}
    asked |= {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
    assert asked == names == {"http", "admin"}


def test_the_service_calls_nobody() -> None:
    policy = of_kind("NetworkPolicy", BASE)["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["egress"] == []


def test_a_rolling_update_never_has_fewer_replicas_than_before() -> None:
    assert DEPLOYMENT["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    assert "replicas" not in DEPLOYMENT["spec"]  # the autoscaler's
    scaler = of_kind("HorizontalPodAutoscaler", BASE)["spec"]
    assert 2 <= scaler["minReplicas"] < scaler["maxReplicas"]
    assert of_kind("PodDisruptionBudget", BASE)["spec"]["maxUnavailable"] == 1


def test_prometheus_finds_every_replica_ready_or_not_under_the_job_that_the_rules_look_for() -> (
    None
):
    monitor = of_kind("ServiceMonitor", objects("monitoring"))["spec"]
    admin = of_kind("Service", BASE, "slipway-admin")
    assert monitor["selector"]["matchLabels"].items() <= admin["metadata"]["labels"].items()
    assert (
        not monitor["selector"]["matchLabels"].items()
        <= of_kind("Service", BASE)["metadata"]["labels"].items()
    )
    assert admin["metadata"]["labels"][monitor["jobLabel"]].startswith("slipway")
    assert (admin["spec"]["clusterIP"], admin["spec"]["publishNotReadyAddresses"]) == ("None", True)
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] == admin["spec"]["ports"][0]["name"]
    assert endpoint["path"] == "/metrics"


def test_the_rules_are_the_same_as_objects_of_the_prometheus_operator() -> None:
    done = subprocess.run([KUBERNETES / "rules.sh"], capture_output=True, text=True, check=True)
    found = list(yaml.safe_load_all(done.stdout))
    assert [one["metadata"]["name"] for one in found] == [f"slipway-{path.stem}" for path in RULES]
    assert [one["spec"] for one in found] == [yaml.safe_load(path.read_text()) for path in RULES]
    assert {one["kind"] for one in found} == {"PrometheusRule"}


@needs_kustomize
@pytest.mark.parametrize("folder", ["base", "gpu"])
def test_what_kustomize_renders_is_as_right_as_the_files(folder: str) -> None:
    found = rendered(folder)
    assert {(one["kind"], one["metadata"]["name"]) for one in found} == {
        (one["kind"], one["metadata"]["name"]) for one in BASE
    }
    assert faults(of_kind("Deployment", found)) == []
    assert container_of(of_kind("Deployment", found))["image"] == "registry.example.com/slipway:1"


@needs_kustomize
def test_on_gpus_each_replica_has_one_and_says_so_or_is_not_ready() -> None:
    found = rendered("gpu")
    container = container_of(of_kind("Deployment", found))
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert settings_of(container).provider == "cuda"
    metrics: list[Any] = of_kind("HorizontalPodAutoscaler", found)["spec"]["metrics"]
    assert [metric["pods"]["metric"]["name"] for metric in metrics] == ["slipway_queue_depth"]
    assert "| `slipway_queue_depth` |" in (ROOT / "docs/serving.md").read_text()
    assert of_kind("Deployment", found)["spec"]["strategy"]["rollingUpdate"] == {
        "maxUnavailable": 1,
        "maxSurge": 0,
    }


def test_every_file_is_named_in_its_kustomization() -> None:
    for folder in ("base", "monitoring", "gpu"):
        content = yaml.safe_load((KUBERNETES / folder / "kustomization.yaml").read_text())
        named = {name for name in content["resources"] if name.endswith(".yaml")} | {
            patch["path"] for patch in content.get("patches", [])
        }
        assert named == {path.name for path in (KUBERNETES / folder).glob("*.yaml")} - {
            "kustomization.yaml"
        }


@pytest.fixture
def schemas() -> Any:
    """The schemas of Kubernetes itself."""
    return pytest.importorskip(
        "kubernetes_validate",
        reason="kubernetes-validate is not installed: the environment is older than the lock",
    )


OLDEST = "1.31"


@pytest.mark.parametrize("version", [OLDEST, "newest"])
def test_every_object_has_the_form_that_kubernetes_takes(schemas: Any, version: str) -> None:
    for one in BASE:
        schemas.validate(
            one, schemas.latest_version() if version == "newest" else OLDEST, strict=True
        )


@pytest.mark.process
@needs_kustomize
@pytest.mark.parametrize("folder", ["base", "gpu"])
def test_what_kustomize_makes_of_them_has_that_form_too(schemas: Any, folder: str) -> None:
    for one in rendered(folder):
        schemas.validate(one, OLDEST, strict=True)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda deployment: deployment["spec"].update(replica=2),
        lambda deployment: pod_of(deployment).update(terminationGracePeriodSeconds="60 s"),
        lambda deployment: container_of(deployment).update(readynessProbe={}),
    ],
    ids=["unknown key", "a text for a number", "misspelled probe"],
)
def test_an_object_of_another_form_is_found(schemas: Any, spoil: Callable[[Object], None]) -> None:
    deployment = copy.deepcopy(DEPLOYMENT)
    spoil(deployment)
    with pytest.raises(schemas.ValidationError):
        schemas.validate(deployment, OLDEST, strict=True)
