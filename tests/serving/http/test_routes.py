"""The route of each path; the service level objectives count only predictions, on every path."""

import re
from pathlib import Path

import httpx
import pytest

from slipway.serving.app import all_routes
from slipway.serving.http.routes import READING, Route, find_route
from slipway.serving.worker import ModelWorker
from tests.monitoring.queries import recorded
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import full_worker, metric, run
from tests.serving.open_inference.infer_requests import pixels_in_json

ROUTES = dict.fromkeys(
    ["/", "/a", "/a/b", "/a/b/*/c", "/a/*", "/d/*/e"], Route(READING, None, "open")
)
COUNTED = {
    name: re.findall(r'route=~"([^"]+)"', recorded()[name])
    for name in ("instance:slipway_predict:total", "instance:slipway_predict_bad:total")
}


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/", "/"),
        ("/a", "/a"),
        ("/a/", "/a"),
        ("/a/b", "/a/b"),
        ("/a/b//", "/a/b"),
        ("/a/b/1/c", "/a/b/*/c"),
        ("/a/b/*/c", "/a/b/*/c"),
        ("/a/b/1/c/", "/a/b/*/c"),
        ("/a/b/1/2/c", "/a/*"),
        ("/a/b/1/c/d", "/a/*"),
        ("/a/1/b/c", "/a/*"),
        ("/a/b/1", "/a/*"),
        ("/a/x", "/a/*"),
        ("/b", None),
        ("/b/", None),
        ("//a/b", None),
        ("/*", None),
        ("", None),
    ],
)
def test_find_route_prefers_the_path_itself_then_any_name_then_everything_below(
    path: str, route: str | None
) -> None:
    assert find_route(ROUTES, path) == route


def predictions(worker: ModelWorker, code: str) -> float:
    """Return the number of requests by the expression in the SLO's rule."""
    ((pattern,), _) = COUNTED.values()
    counted = re.findall(
        r'^slipway_requests_total\{code="(\d+)",route="([^"]+)"\} (\S+)$',
        worker.metrics.exposition().decode(),
        re.MULTILINE,
    )
    return sum(
        float(number)
        for found, route, number in counted
        if found == code and re.fullmatch(pattern, route)
    )


def test_both_slo_rules_count_exactly_the_prediction_routes(
    make_settings: MakeSettings,
) -> None:
    first, second = COUNTED.values()
    assert first == second
    routes = all_routes(full_worker(make_settings()))
    counted = {path for path in routes if re.fullmatch(first[0], path)}
    assert counted == {
        "/predict",
        "/v2/models/slipway/infer",
        "/v2/models/slipway/versions/*/infer",
    }
    assert {routes[path].methods for path in counted} == {("POST",)}


def test_the_slo_counts_predictions_of_every_path_and_nothing_else(
    make_settings: MakeSettings,
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        version = worker.require_model().version
        asked = 0
        for path in ("/v2/models/slipway/infer", f"/v2/models/slipway/versions/{version}/infer"):
            for end in ("", "/", "//"):
                assert (await client.post(path + end, json=pixels_in_json())).status_code == 200
                asked += 1
        metadata = f"/v2/models/slipway/versions/{version}"
        for path in (
            "/v2/health/live",
            "/v2/health/ready",
            "/v2/models/slipway",
            "/v2/models/slipway/ready",
            metadata,
            f"{metadata}/ready",
        ):
            assert (await client.get(path)).status_code == 200
        assert (
            predictions(worker, "200")
            == metric(worker, "slipway_prediction_duration_seconds_count")
            == asked
        )
        assert (
            metric(
                worker,
                'slipway_requests_total{code="200",route="/v2/models/slipway/versions/*/infer"}',
            )
            == 3
        )
        for end in ("", "/ready"):
            route = f"/v2/models/slipway/versions/*{end}"
            assert metric(worker, f'slipway_requests_total{{code="200",route="{route}"}}') == 1

    run(make_settings(), work)


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "route"),
    [
        (
            "POST",
            "/v2/models/slipway/versions/7/infer",
            404,
            "unknown_model",
            "/v2/models/slipway/versions/*/infer",
        ),
        (
            "GET",
            "/v2/models/slipway/versions/7/infer",
            405,
            "method_not_allowed",
            "/v2/models/slipway/versions/*/infer",
        ),
        ("POST", "/v2/models/other/infer", 404, "unknown_model", "/v2/*"),
        ("POST", "/v2/models/other/versions/7/infer", 404, "unknown_model", "/v2/*"),
        (
            "POST",
            "/v2/models/slipway/versions/{version}/ready",
            405,
            "method_not_allowed",
            "/v2/models/slipway/versions/*/ready",
        ),
        ("POST", "/v2/models/slipway/versions/{version}/x/infer", 404, "not_found", "/v2/*"),
    ],
)
def test_unknown_v2_paths_are_counted_under_the_route_of_their_kind(
    make_settings: MakeSettings, method: str, path: str, status: int, code: str, route: str
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        answer = await client.request(method, path.format(version=worker.require_model().version))
        assert (answer.status_code, answer.json()["code"]) == (status, code)
        assert metric(worker, f'slipway_requests_total{{code="{status}",route="{route}"}}') == 1

    run(make_settings(), work)


def test_without_a_model_predictions_count_as_failed_and_probes_do_not_count(
    certified: Path, make_settings: MakeSettings
) -> None:
    (certified / "certificate.json").unlink()

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        assert (
            await client.post("/v2/models/slipway/versions/7/infer", json=pixels_in_json())
        ).status_code == 503
        for path in (
            "/v2/health/ready",
            "/v2/models/slipway/ready",
            "/v2/models/slipway",
            "/v2/models/slipway/versions/7/ready",
        ):
            assert (await client.get(path)).status_code == 503
        assert predictions(worker, "503") == 1

    run(make_settings(), work)
