"""The Kubernetes manifests match the service's settings, ports and routes."""

import copy
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
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
from tests.monitoring.test_rules import needs_promtool, promtool

BASE = objects("base")
QUEUE_WAIT = "slipway_queue_wait_seconds"
DEPLOYMENT = of_kind("Deployment", BASE)
POD = pod_of(DEPLOYMENT)
CONTAINER = container_of(DEPLOYMENT)
LABELS = {"app.kubernetes.io/name": "slipway"}
needs_kustomize = pytest.mark.skipif(
    shutil.which("kubectl") is None,
    reason="kubectl, which renders with kustomize, is not installed",
)


def test_the_deployment_matches_the_settings_ports_and_routes_of_the_service() -> None:
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
        (variable("SLIPWAY_ADMIN_PORT", "3002"), "the admin port is not the port"),
        (variable("SLIPWAY_ADMIN_HOST", "127.0.0.1"), "not reachable from outside the pod"),
        (variable("SLIPWAY_DRAIN_S", "40"), "killed before it has drained"),
        (variable("SLIPWAY_KEYS", "/etc/keys"), "the key file is not on a mounted volume"),
        (variable("SLIPWAY_STATE", ".work/serving"), "the state is not on a volume"),
        (variable("SLIPWAY_NUM_THREADS", "0"), "the number of threads differs"),
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
            "a probe uses another port",
        ),
    ],
)
def test_each_fault_of_a_deployment_is_detected(
    spoil: Callable[[Object], None], fault: str
) -> None:
    deployment = copy.deepcopy(DEPLOYMENT)
    spoil(deployment)
    (found,) = faults(deployment)
    assert fault in found


def test_the_pod_runs_without_root_privileges_on_a_read_only_root_file_system() -> None:
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


def test_only_the_readiness_probe_depends_on_a_loaded_model() -> None:
    """A refused model must not restart the process, but its pod must not receive requests."""
    paths = {
        name: CONTAINER[name]["httpGet"]["path"]
        for name in ("startupProbe", "readinessProbe", "livenessProbe")
    }
    assert paths == {
        "startupProbe": "/livez",
        "readinessProbe": "/readyz",
        "livenessProbe": "/livez",
    }


def test_every_volume_is_mounted_and_only_the_service_can_read_the_keys() -> None:
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    assert set(volumes) == {mount["name"] for mount in CONTAINER["volumeMounts"]}
    assert volumes["keys"]["secret"] == {"secretName": "slipway-keys", "defaultMode": KEY_FILE_MODE}
    assert all(
        "sizeLimit" in volume["emptyDir"] for volume in volumes.values() if "emptyDir" in volume
    )


def test_every_selector_matches_the_labels_of_the_pods() -> None:
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


def test_services_and_network_policy_use_ports_of_the_container() -> None:
    names = {port["name"] for port in CONTAINER["ports"]}
    services = [of_kind("Service", BASE), of_kind("Service", BASE, "slipway-admin")]
    policy = of_kind("NetworkPolicy", BASE)["spec"]
    asked = {port["targetPort"] for service in services for port in service["spec"]["ports"]}
    asked |= {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
    assert asked == names == {"http", "admin"}


def test_the_network_policy_forbids_outgoing_connections() -> None:
    policy = of_kind("NetworkPolicy", BASE)["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["egress"] == []


def test_a_rolling_update_never_reduces_the_number_of_replicas() -> None:
    assert DEPLOYMENT["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    assert "replicas" not in DEPLOYMENT["spec"]  # the autoscaler sets them
    scaler = of_kind("HorizontalPodAutoscaler", BASE)["spec"]
    assert 2 <= scaler["minReplicas"] < scaler["maxReplicas"]
    assert of_kind("PodDisruptionBudget", BASE)["spec"]["maxUnavailable"] == 1


def test_prometheus_scrapes_every_replica_in_a_job_that_the_rules_select() -> None:
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


def test_the_objects_for_the_prometheus_operator_contain_the_same_rules() -> None:
    done = subprocess.run([KUBERNETES / "rules.sh"], capture_output=True, text=True, check=True)
    found = list(yaml.safe_load_all(done.stdout))
    assert [one["metadata"]["name"] for one in found] == [f"slipway-{path.stem}" for path in RULES]
    assert [one["spec"] for one in found] == [yaml.safe_load(path.read_text()) for path in RULES]
    assert {one["kind"] for one in found} == {"PrometheusRule"}


@needs_kustomize
@pytest.mark.parametrize("folder", ["base", "gpu"])
def test_the_objects_that_kustomize_renders_have_no_faults(folder: str) -> None:
    found = rendered(folder)
    assert {(one["kind"], one["metadata"]["name"]) for one in found} == {
        (one["kind"], one["metadata"]["name"]) for one in BASE
    }
    assert faults(of_kind("Deployment", found)) == []
    assert container_of(of_kind("Deployment", found))["image"] == "registry.example.com/slipway:1"


@needs_kustomize
def test_each_gpu_replica_requests_one_gpu_and_never_falls_back_to_the_cpu() -> None:
    found = rendered("gpu")
    container = container_of(of_kind("Deployment", found))
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert settings_of(container).provider == "cuda"
    metrics: list[Any] = of_kind("HorizontalPodAutoscaler", found)["spec"]["metrics"]
    assert [metric["pods"]["metric"]["name"] for metric in metrics] == [QUEUE_WAIT]
    assert of_kind("Deployment", found)["spec"]["strategy"]["rollingUpdate"] == {
        "maxUnavailable": 1,
        "maxSurge": 0,
    }


def test_replicas_are_added_by_the_wait_in_the_queue_that_the_adapter_reads() -> None:
    metrics = of_kind("HorizontalPodAutoscaler", BASE)["spec"]["metrics"]
    assert [one["pods"]["metric"]["name"] for one in metrics if one["type"] == "Pods"] == [
        QUEUE_WAIT
    ]
    (rule,) = yaml.safe_load((ROOT / "monitoring/adapter.yml").read_text())["rules"]["custom"]
    assert rule["name"]["as"] == QUEUE_WAIT
    assert rule["seriesQuery"].startswith(f"{QUEUE_WAIT}_bucket{{")
    assert f"| `{QUEUE_WAIT}` |" in (ROOT / "docs/reference/serving.md").read_text()


@needs_promtool
@pytest.mark.process
def test_the_adapter_reads_the_95th_percentile_and_0_without_requests(tmp_path: Path) -> None:
    (rule,) = yaml.safe_load((ROOT / "monitoring/adapter.yml").read_text())["rules"]["custom"]
    query = rule["metricsQuery"]
    for name, value in (
        ("GroupBy", "pod"),
        ("Series", f"{QUEUE_WAIT}_bucket"),
        ("LabelMatchers", 'namespace="here"'),
    ):
        query = query.replace(f"<<.{name}>>", value)
    series = [
        {"series": f'{QUEUE_WAIT}_bucket{{namespace="here",pod="{pod}",le="{le}"}}', "values": seen}
        for pod, counts in (("busy", "0+60x10"), ("idle", "5x10"))
        for le in ("0.1", "0.5", "+Inf")
        for seen in ("0x10" if (pod, le) == ("busy", "0.1") else counts,)
    ]
    samples = [
        {"labels": '{pod="busy"}', "value": 0.48},  # between 0.1 and 0.5
        {"labels": '{pod="idle"}', "value": 0},
    ]
    expected = {"expr": query, "eval_time": "10m", "exp_samples": samples}
    tests = {"interval": "1m", "input_series": series, "promql_expr_test": [expected]}
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"tests": [tests]}))
    done = promtool("test", "rules", tmp_path / "test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_one_slow_probe_does_not_remove_a_replica() -> None:
    probe = CONTAINER["readinessProbe"]
    assert probe["failureThreshold"] == 3
    assert probe["failureThreshold"] * probe["periodSeconds"] < settings_of(CONTAINER).drain_s


def test_ingress_uses_tls_and_routes_to_the_service() -> None:
    found = objects("ingress")
    ingress = of_kind("Ingress", found)
    (tls,), (rule,) = ingress["spec"]["tls"], ingress["spec"]["rules"]
    assert tls["hosts"] == [rule["host"]]
    (path,) = rule["http"]["paths"]
    service = of_kind("Service", BASE)
    assert path["backend"]["service"] == {
        "name": "slipway",
        "port": {"name": service["spec"]["ports"][0]["name"]},
    }
    options = {
        name.rpartition("/")[2]: value for name, value in ingress["metadata"]["annotations"].items()
    }
    settings = settings_of(CONTAINER)
    assert options["ssl-redirect"] == "true"
    assert int(options["proxy-body-size"].removesuffix("m")) << 20 == settings.max_body_bytes
    assert int(options["proxy-read-timeout"]) > settings.request_timeout_s
    assert options["affinity"] == "cookie"
    policy = of_kind("NetworkPolicy", found, "slipway-ingress")["spec"]
    assert policy["podSelector"]["matchLabels"] == LABELS
    assert [port["port"] for port in policy["ingress"][0]["ports"]] == ["http"]


@needs_kustomize
def test_stateful_replicas_keep_their_state_and_their_callers() -> None:
    found = rendered("stateful")
    kinds = {one["kind"] for one in found}
    assert not kinds & {"Deployment", "HorizontalPodAutoscaler"}
    replicas = of_kind("StatefulSet", found)
    assert faults(replicas) == []
    (claim,) = replicas["spec"]["volumeClaimTemplates"]
    assert claim["metadata"]["name"] == "state"
    assert {volume["name"] for volume in pod_of(replicas)["volumes"]} == {"keys", "tmp"}
    assert of_kind("Service", found, replicas["spec"]["serviceName"])["spec"]["clusterIP"] == "None"
    assert of_kind("Service", found)["spec"]["sessionAffinity"] == "ClientIP"


@needs_kustomize
def test_the_candidate_is_the_base_under_another_name_with_another_image() -> None:
    """Each selector finds the candidate's pods only; the callers stay those of the base."""
    found = rendered("canary")
    name = "slipway-candidate"
    deployment = of_kind("Deployment", found, name)
    assert faults(deployment) == []
    assert container_of(deployment)["image"] == "registry.example.com/slipway:2"
    selectors = [
        deployment["spec"]["selector"]["matchLabels"],
        deployment["spec"]["template"]["metadata"]["labels"],
        pod_of(deployment)["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"],
        *(one["spec"]["selector"] for one in found if one["kind"] == "Service"),
        of_kind("PodDisruptionBudget", found, name)["spec"]["selector"]["matchLabels"],
        of_kind("NetworkPolicy", found, name)["spec"]["podSelector"]["matchLabels"],
    ]
    assert selectors == [{"app.kubernetes.io/name": name}] * 7
    scaler = of_kind("HorizontalPodAutoscaler", found, name)["spec"]
    assert scaler["scaleTargetRef"]["name"] == name
    callers = of_kind("NetworkPolicy", found, name)["spec"]["ingress"]
    assert callers == of_kind("NetworkPolicy", BASE)["spec"]["ingress"]
    monitor = of_kind("ServiceMonitor", found, name)["spec"]
    (admin,) = (
        one
        for one in found
        if one["kind"] == "Service" and one["metadata"]["name"].startswith("slipway-admin")
    )
    assert monitor["selector"]["matchLabels"].items() <= admin["metadata"]["labels"].items()


def test_the_route_has_the_backends_that_the_rollout_patches() -> None:
    """Only by structure: the schemas of the Gateway API are in no package of Python."""
    route = of_kind("HTTPRoute", objects("canary"))
    assert route["apiVersion"] == "gateway.networking.k8s.io/v1"
    (rule,) = route["spec"]["rules"]
    port = of_kind("Service", BASE)["spec"]["ports"][0]["port"]
    assert rule["backendRefs"] == [
        {"name": "slipway", "port": port, "weight": 100},
        {"name": "slipway-candidate", "port": port, "weight": 0},
    ]


@needs_kustomize
def test_replicas_that_share_feedback_reach_their_database_and_nothing_else() -> None:
    found = rendered("shared")
    deployment = of_kind("Deployment", found)
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    assert faults(deployment) == []
    environment = {one["name"]: one for one in container_of(deployment)["env"]}
    url = environment["SLIPWAY_DATABASE_URL"]["value"]
    assert ":" not in url.partition("://")[2]  # the password comes from a secret
    assert environment["PGPASSWORD"]["valueFrom"]["secretKeyRef"]["name"] == "slipway-postgres"
    egress = of_kind("NetworkPolicy", found)["spec"]["egress"]
    assert [port["port"] for rule in egress for port in rule["ports"]] == [5432, 53, 53]


def test_every_manifest_is_listed_in_its_kustomization() -> None:
    for folder in ("base", "monitoring", "gpu", "ingress", "stateful", "canary", "shared"):
        content = yaml.safe_load((KUBERNETES / folder / "kustomization.yaml").read_text())
        named = {name for name in content["resources"] if name.endswith(".yaml")} | {
            patch["path"] for patch in content.get("patches", [])
        }
        assert named == {path.name for path in (KUBERNETES / folder).glob("*.yaml")} - {
            "kustomization.yaml"
        }


@pytest.fixture
def schemas() -> Any:
    """The official Kubernetes schemas."""
    return pytest.importorskip(
        "kubernetes_validate",
        reason="kubernetes-validate is not installed: the environment is older than the lock",
    )


OLDEST = "1.31"


@pytest.mark.parametrize("version", [OLDEST, "newest"])
def test_every_object_is_valid_by_the_kubernetes_schemas(schemas: Any, version: str) -> None:
    for one in BASE:
        schemas.validate(
            one, schemas.latest_version() if version == "newest" else OLDEST, strict=True
        )


@pytest.mark.process
@needs_kustomize
@pytest.mark.parametrize("folder", ["base", "gpu", "ingress", "stateful", "canary", "shared"])
def test_every_rendered_object_is_valid_by_the_kubernetes_schemas(
    schemas: Any, folder: str
) -> None:
    for one in rendered(folder):
        if one["kind"] in ("HTTPRoute", "ServiceMonitor"):  # of other projects
            continue
        schemas.validate(one, OLDEST, strict=True)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda deployment: deployment["spec"].update(replica=2),
        lambda deployment: pod_of(deployment).update(terminationGracePeriodSeconds="60 s"),
        lambda deployment: container_of(deployment).update(readynessProbe={}),
    ],
    ids=["unknown key", "string for a number", "misspelled probe"],
)
def test_the_kubernetes_schemas_reject_invalid_objects(
    schemas: Any, spoil: Callable[[Object], None]
) -> None:
    deployment = copy.deepcopy(DEPLOYMENT)
    spoil(deployment)
    with pytest.raises(schemas.ValidationError):
        schemas.validate(deployment, OLDEST, strict=True)
