"""Authentication by key and role; without keys, by address and the headers `Host` and `Origin`."""

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from slipway.serving.app import Application, all_routes
from slipway.serving.auth.extension import presented_key
from slipway.serving.auth.keys import add_key
from slipway.serving.extension import Extension
from slipway.serving.extensions import EXTENSIONS
from slipway.serving.http.callers import is_loopback, is_own_host
from slipway.serving.process.addresses import require_free, require_safe_start
from slipway.serving.settings import SettingsError
from slipway.serving.worker import ModelWorker
from slipway.system.errors import SlipwayError
from tests.serving.bundles import picture
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import behind, error_of, metric, read_all_settings, run
from tests.serving.server import free_port

PNG = {"content-type": "image/png"}
OPERATORS = ("/metrics", "/docs", "/docs.json", "/rollout")
OPEN = ("/livez", "/healthz", "/readyz")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_without_a_key_callers_get_401_and_probes_are_open(
    tmp_path: Path, make_settings: MakeSettings
) -> None:
    caller = add_key(tmp_path / "keys", "alice", "caller", None)
    operator = add_key(tmp_path / "keys", "ops", "operator", None)

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        for path in OPEN:
            assert (await client.get(path)).status_code == 200
        for path in ("/model", "/schema.json", *OPERATORS):
            refused = await client.get(path)
            assert error_of(refused)["code"] == "key_missing"
            assert refused.headers["www-authenticate"] == "Bearer"
            assert (await client.get(path, headers=bearer(operator))).status_code in (200, 299)
        for path in OPERATORS:
            assert error_of(await client.get(path, headers=bearer(caller)))["code"] == "not_allowed"
        for headers in (
            bearer(caller),
            {"x-api-key": caller},
            {"authorization": f"bearer  {caller}"},
            bearer(operator),
        ):
            assert (
                await client.post("/predict", content=picture(), headers=PNG | headers)
            ).status_code == 200
        wrong = await client.post("/predict", content=picture(), headers=PNG | bearer(caller + "x"))
        assert error_of(wrong)["code"] == "key_unknown"
        assert "invalid_token" in wrong.headers["www-authenticate"]
        assert caller not in wrong.text
        counted = {
            reason: metric(worker, f'slipway_auth_failures_total{{reason="{reason}"}}')
            for reason in ("missing", "unknown", "role")
        }
        assert counted == {"missing": 6, "unknown": 1, "role": 4}

    run(make_settings(keys=tmp_path / "keys"), work)


def test_only_probes_and_the_static_page_need_no_key(
    tmp_path: Path, make_settings: MakeSettings
) -> None:
    add_key(tmp_path / "keys", "alice", "caller", None)

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        routes = all_routes(worker)
        assert {path for path, route in routes.items() if route.access == "open"} == {
            *OPEN, "/", "/static/*", "/v2/health/live", "/v2/health/ready"
        }  # fmt: skip
        for path, route in routes.items():
            for method in route.methods:
                status = (await client.request(method, path.replace("/*", "/x"))).status_code
                assert (status == 401) is (route.access != "open"), (method, path)

    run(make_settings(keys=tmp_path / "keys"), work)


def test_only_a_key_above_its_rate_receives_429_with_retry_after(
    tmp_path: Path, make_settings: MakeSettings
) -> None:
    slow = add_key(tmp_path / "keys", "slow", "caller", 0.05)
    free = add_key(tmp_path / "keys", "free", "caller", None)

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        assert (await client.get("/model", headers=bearer(slow))).status_code == 200
        refused = await client.get("/model", headers=bearer(slow))
        assert error_of(refused)["code"] == "rate_limited"
        assert 15 <= int(refused.headers["retry-after"]) <= 20
        for _ in range(20):
            assert (await client.get("/model", headers=bearer(free))).status_code == 200
        assert metric(worker, 'slipway_auth_failures_total{reason="rate"}') == 1

    run(make_settings(keys=tmp_path / "keys"), work)


def test_key_is_checked_before_the_rest_of_the_request(
    tmp_path: Path, make_settings: MakeSettings
) -> None:
    add_key(tmp_path / "keys", "alice", "caller", None)

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        for method, content in (
            ("GET", b""),
            ("DELETE", b""),
            ("POST", b"no image"),
            ("POST", b"x" * 100_000),
        ):
            assert (
                error_of(await client.request(method, "/predict", content=content))["code"]
                == "key_missing"
            )

    run(make_settings(keys=tmp_path / "keys", max_body_bytes=1000), work)


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({}, None),
        ({b"authorization": b"Bearer abc"}, b"abc"),
        ({b"authorization": b"BEARER   abc "}, b"abc"),
        ({b"authorization": b"Bearer "}, None),
        ({b"authorization": b"Basic YTpi"}, None),
        ({b"authorization": b"Basic YTpi", b"x-api-key": b"abc"}, b"abc"),
        ({b"authorization": b"Bearer one", b"x-api-key": b"two"}, b"one"),
        ({b"x-api-key": b""}, None),
    ],
)
def test_a_key_is_read_from_authorization_or_x_api_key(
    headers: dict[bytes, bytes], key: bytes | None
) -> None:
    assert presented_key(headers) == key


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:3000",
        "a.localhost",
        "127.0.0.1:3000",
        "10.1.2.3",
        "[::1]:3000",
        "model.example.org",
    ],
)
def test_host_names_of_this_machine_are_accepted_without_keys(host: str) -> None:
    assert is_own_host(host.encode(), frozenset({"model.example.org"}))


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "service",
        "[evil.example]",
        "evil@127.0.0.1",
        "127.0.0.1:x@evil",
        "localhost:3000@evil.example",
        "localhost:3000:80",
        "[::1]evil.example",
        "[::1",
        "localhost ",
        "\xe4",
    ],
)
def test_other_host_names_are_refused_against_dns_rebinding(host: str) -> None:
    assert not is_own_host(host.encode("latin-1"), frozenset({"model.example.org"}))


FOREIGN: list[tuple[dict[str, str], str]] = [
    ({"host": "evil.example"}, "unknown_host"),
    ({"host": "evil.example", "origin": "http://evil.example"}, "unknown_host"),
    ({"origin": "http://evil.example"}, "foreign_origin"),
    ({"origin": "null"}, "foreign_origin"),
    ({"origin": "http://localhost:8080"}, "foreign_origin"),
]


@pytest.mark.parametrize(("headers", "code"), FOREIGN)
def test_without_keys_requests_from_pages_of_other_sites_are_refused(
    make_settings: MakeSettings, headers: dict[str, str], code: str
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        for answer in (
            await client.post("/predict", content=picture(), headers=PNG | headers),
            await client.get("/model", headers=headers),
            await client.get("/metrics", headers=headers),
        ):
            assert error_of(answer)["code"] == code

    run(make_settings(), work)


def test_the_services_own_page_and_allowed_hosts_are_accepted(make_settings: MakeSettings) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        for headers in (
            {"origin": "http://localhost"},
            {"host": "model.example.org", "origin": "https://model.example.org"},
            {"host": "127.0.0.1:3000", "origin": "http://127.0.0.1:3000"},
        ):
            assert (
                await client.post("/predict", content=picture(), headers=PNG | headers)
            ).status_code == 200

    run(make_settings(allowed_hosts="other,Model.Example.org"), work)


@pytest.mark.parametrize("has_keys", [True, False])
def test_with_keys_or_without_authentication_host_and_origin_are_not_checked(
    tmp_path: Path, make_settings: MakeSettings, has_keys: bool
) -> None:
    key = add_key(tmp_path / "keys", "alice", "caller", None)

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        for headers, _ in FOREIGN:
            assert (await client.get("/model", headers=headers | bearer(key))).status_code == 200

    variables: dict[str, Any] = {"keys": tmp_path / "keys"} if has_keys else {"disable_auth": True}
    run(make_settings(**variables), work)


def test_no_response_has_a_cors_header(make_settings: MakeSettings) -> None:
    """Neither a preflight nor another response has a CORS header."""

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        preflight = {"origin": "http://localhost", "access-control-request-method": "POST"}
        for answer in (
            await client.options("/predict", headers=preflight),
            await client.get("/livez", headers=preflight),
        ):
            assert not [name for name in answer.headers if name.startswith("access-control")]

    run(make_settings(), work)


@pytest.mark.parametrize(
    "path", ["/livez", "/model", "/", "/docs", "/docs.json", "/schema.json", "/nowhere", "/predict"]
)
def test_every_response_has_the_security_headers_once(
    make_settings: MakeSettings, path: str
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        answer = await client.get(path)
        names = [name for name, _ in answer.headers.multi_items()]
        assert len(names) == len(set(names))
        assert answer.headers["x-content-type-options"] == "nosniff"
        is_json = answer.headers.get("content-type") == "application/json"
        assert answer.headers.get("referrer-policy") == (None if is_json else "no-referrer")
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert "server" not in answer.headers
        assert answer.headers["x-request-id"]

    run(make_settings(), work)


async def statuses(application: Application, headers: dict[str, str]) -> dict[str, int]:
    paths = ("/", "/livez", "/readyz", "/model", "/schema.json", *OPERATORS)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(application), base_url="http://localhost"
    ) as client:
        return {path: (await client.get(path, headers=headers)).status_code for path in paths}


def test_with_an_admin_port_operator_routes_answer_only_there(
    tmp_path: Path, make_settings: MakeSettings
) -> None:
    operator = bearer(add_key(tmp_path / "keys", "ops", "operator", None))

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        main = Application(behind, worker)
        at_main, at_second = (
            await statuses(main, operator),
            await statuses(main.for_operators(), operator),
        )
        probes = dict.fromkeys(("/livez", "/readyz"), 200)
        assert at_main == probes | {"/": 200, "/model": 200, "/schema.json": 299} | dict.fromkeys(
            OPERATORS, 404
        )
        assert at_second == probes | {"/": 404, "/model": 404, "/schema.json": 404} | dict.fromkeys(
            OPERATORS, 200
        )
        assert {(await statuses(main.for_operators(), {}))[path] for path in OPERATORS} == {401}

    run(make_settings(keys=tmp_path / "keys", admin_port=3999), work)


def test_the_rate_of_a_key_counts_over_both_ports(
    tmp_path: Path, make_settings: MakeSettings
) -> None:
    operator = bearer(add_key(tmp_path / "keys", "ops", "operator", 0.001))

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        main = Application(behind, worker)
        assert sorted((await statuses(main, operator)).values()) == [
            200,
            200,
            200,
            200,
            404,
            404,
            404,
            404,
            429,
        ]
        assert [(await statuses(main.for_operators(), operator))[path] for path in OPERATORS] == [
            429
        ] * 4

    run(make_settings(keys=tmp_path / "keys", admin_port=3999), work)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("example.org", False),
        ("", False),
    ],
)
def test_is_loopback_is_true_only_for_addresses_unreachable_from_other_machines(
    address: str, expected: bool
) -> None:
    assert is_loopback(address) is expected


def test_a_reachable_address_requires_keys_or_disabled_authentication(tmp_path: Path) -> None:
    def start(extensions: Sequence[Extension] = EXTENSIONS, **variables: str) -> None:
        environment = {f"SLIPWAY_{name.upper()}": value for name, value in variables.items()}
        require_safe_start(read_all_settings(environment), extensions, "0.0.0.0", free_port())

    add_key(tmp_path / "keys", "alice", "caller", None)
    start(keys=str(tmp_path / "keys"))
    start(disable_auth="true")
    with pytest.raises(SettingsError, match="SLIPWAY_KEYS=FILE; or set SLIPWAY_DISABLE_AUTH=true"):
        start(keys="")
    with pytest.raises(SettingsError, match="this service has no authentication"):
        start((), disable_auth="true")
    require_safe_start(read_all_settings({}), (), "127.0.0.1", free_port())


def test_an_address_of_another_machine_is_reported_in_one_line(tmp_path: Path) -> None:
    for host in ("203.0.113.1", "no.such.name.invalid"):
        with pytest.raises(SettingsError, match=f"cannot listen on {host}:3999") as error:
            require_free(host, 3999, "Choose another with --port")
        assert len(str(error.value).splitlines()) == 1


def test_reasons_against_a_start_are_reported_in_one_line(
    tmp_path: Path, make_settings: MakeSettings
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        wrong: list[tuple[int, dict[str, Any], str]] = [
            (port, {}, "cannot listen on 127.0.0.1"),
            (free_port(), {"keys": tmp_path / "none"}, "cannot read the key file .*: No such file"),
            (free_port(), {"admin_port": port}, "Choose another with SLIPWAY_ADMIN_PORT"),
            (3999, {"admin_port": 3999}, "the main port"),
            (
                free_port(),
                {"admin_port": free_port(), "admin_host": "0.0.0.0"},
                "can be reached from other machines",
            ),
        ]
        for main, variables, reason in wrong:
            with pytest.raises(SlipwayError, match=reason) as error:
                require_safe_start(make_settings(**variables), EXTENSIONS, "127.0.0.1", main)
            assert len(str(error.value).splitlines()) == 1
    require_safe_start(make_settings(admin_port=port), EXTENSIONS, "127.0.0.1", free_port())
