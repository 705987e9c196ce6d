"""The OpenAPI document describes every route, with schemas that real responses fit."""

import asyncio
import json
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from slipway.serving.api_docs.extension import render_docs, routes
from slipway.serving.api_docs.openapi import openapi
from slipway.serving.app import all_routes
from slipway.serving.auth.extension import KeyCheck
from slipway.serving.endpoints.predict import describe_predict
from slipway.serving.http.callers import LoopbackOnly
from slipway.serving.http.responses import ERRORS, Response
from slipway.serving.http.routes import READING, Operation, Request, Route, always
from slipway.serving.schemas import prediction_content
from slipway.serving.worker import ModelWorker
from tests.serving.bundles import (
    LABELS,
    ROW,
    certify,
    log_of_mean,
    picture,
    row_classifier,
    row_sum,
    write_bundle,
)
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import full_worker, run

GRAPHS = {
    "images": None,
    "values of images": log_of_mean,
    "rows": row_classifier,
    "values of rows": row_sum,
}


@pytest.fixture(params=GRAPHS)
def asked(request: pytest.FixtureRequest, certified: Path) -> dict[str, Any]:
    """Return a function that sends a request to `/predict` of a service with a bundle of GRAPHS."""
    make = GRAPHS[request.param]
    if make:
        certify(certified / "certificate.json", write_bundle(certified / "bundle", make()))
    if "rows" in request.param:
        return {"json": ROW}
    return {"content": picture(), "headers": {"content-type": "image/png"}}


def parts_of(content: Any, place: str = "#") -> Iterator[tuple[str, Any]]:
    """Yield everything in a document, each part with its path."""
    yield place, content
    if isinstance(content, dict):
        for name, value in content.items():
            yield from parts_of(value, f"{place}/{name}")
    elif isinstance(content, list):
        for number, value in enumerate(content):
            yield from parts_of(value, f"{place}/{number}")


def undescribed(document: dict[str, Any]) -> list[str]:
    """Return the operations without a summary."""
    return [
        f"{method} {path}"
        for path, item in document["paths"].items()
        for method, operation in item.items()
        if method != "parameters" and not operation["summary"].endswith(".")
    ]


def test_openapi_document_describes_exactly_the_routes(
    make_settings: MakeSettings, asked: dict[str, Any]
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        document = (await client.get("/docs.json")).json()
        described = {
            (path, method)
            for path, item in document["paths"].items()
            for method in item
            if method != "parameters"
        }
        assert described == {
            (path.replace("/*/", "/{name}/").replace("/*", "/{below}"), method.lower())
            for path, route in all_routes(worker).items()
            for method in route.methods
            if method != "HEAD"
        }
        assert undescribed(document) == []

    run(make_settings(), work)


WITH_KEYS = KeyCheck.__new__(KeyCheck)  # openapi reads only what its class says
WITHOUT_KEYS = LoopbackOnly()


async def nothing(request: Request) -> Response:
    return Response(200, b"")


def test_the_check_of_the_api_document_finds_a_route_without_a_summary() -> None:
    routes = {
        "/new/*": Route(("PUT",), nothing, "operator"),
        "/old": Route(READING, nothing, "open", always(Operation("What was."))),
    }
    document = openapi(routes, None, None, WITH_KEYS)
    assert undescribed(document) == ["put /new/{below}"]
    assert document["paths"]["/new/{below}"]["parameters"][0]["name"] == "below"


def test_openapi_document_declares_every_placeholder_of_a_path_as_parameter(
    make_settings: MakeSettings,
) -> None:
    paths = openapi(all_routes(full_worker(make_settings())), None, None, WITHOUT_KEYS)["paths"]
    places = {path: re.findall(r"\{(\w+)\}", path) for path in paths}
    assert {
        path: [one["name"] for one in item.get("parameters", [])] for path, item in paths.items()
    } == places
    assert places["/v2/models/slipway/versions/{name}/infer"] == ["name"]
    assert "requestBody" in paths["/v2/models/slipway/versions/{name}/infer"]["post"]
    assert "requestBody" not in paths["/v2/{below}"]["post"]
    assert not [path for path in paths if "*" in path]


def test_openapi_document_has_unique_names_and_no_dangling_references(
    make_settings: MakeSettings, asked: dict[str, Any]
) -> None:
    """Names are unique, references lead somewhere, every status of an error is one of its codes."""

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        document = (await client.get("/docs.json")).json()
        places = dict(parts_of(document))
        names = [value for place, value in places.items() if place.endswith("/operationId")]
        assert len(names) == len(set(names))
        references = [value for place, value in places.items() if place.endswith("/$ref")]
        assert references
        assert set(references) <= set(places)
        for item in document["paths"].values():
            for method, operation in item.items():
                for status, answer in (
                    operation["responses"].items() if method != "parameters" else ()
                ):
                    if int(status) >= 400:
                        assert {
                            str(ERRORS[code]) for code in answer["description"].split(", ")
                        } == {status}

    run(make_settings(), work)


def test_an_openapi_validator_accepts_the_document(
    make_settings: MakeSettings, asked: dict[str, Any]
) -> None:
    validator = pytest.importorskip(
        "openapi_spec_validator",
        reason="openapi-spec-validator is not installed; it is no dependency",
    )

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        validator.validate((await client.get("/docs.json")).json())

    run(make_settings(), work)


def faults(content: Any, schema: dict[str, Any]) -> list[str]:
    """Return the violations of a schema, for the keywords that slipway/serving/schemas.py uses."""
    if "oneOf" in schema:
        found = [faults(content, choice) for choice in schema["oneOf"]]
        return (
            []
            if found.count([]) == 1
            else [f"fits {found.count([])} of {len(found)} choices: {found}"]
        )
    if content is None and schema.get("nullable"):
        return []
    types: dict[str, Any] = {
        "object": dict,
        "array": list,
        "string": str,
        "number": (int, float),
        "boolean": bool,
    }
    if not isinstance(content, types[schema["type"]]) or (
        isinstance(content, bool) and schema["type"] == "number"
    ):
        return [f"{content!r} is no {schema['type']}"]
    wrong = (
        [f"{content!r} is none of the enumeration"]
        if content not in schema.get("enum", [content])
        else []
    )
    if schema["type"] == "number" and not schema.get("minimum", content) <= content <= schema.get(
        "maximum", content
    ):
        wrong.append(f"{content} is out of bounds")
    if schema["type"] == "array":
        wrong += [fault for value in content for fault in faults(value, schema["items"])]
        if not schema.get("minItems", 0) <= len(content) <= schema.get("maxItems", len(content)):
            wrong.append(f"{len(content)} items")
    if schema["type"] == "object":
        properties = schema.get("properties", {})
        wrong += [
            f"{name} is missing" for name in schema.get("required", []) if name not in content
        ]
        wrong += [
            fault
            for name, value in content.items()
            if name in properties
            for fault in faults(value, properties[name])
        ]
        if schema.get("additionalProperties") is False:
            wrong += [f"{name} is unknown" for name in content if name not in properties]
    return wrong


def test_real_requests_and_responses_match_their_openapi_schemas(
    make_settings: MakeSettings, asked: dict[str, Any]
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        described = (await client.get("/docs.json")).json()["paths"]["/predict"]["post"]
        schema = described["responses"]["200"]["content"]["application/json"]["schema"]
        answer = (await client.post("/predict", **asked)).json()
        assert faults(answer, schema) == []
        assert faults(answer | {"ood_score": "high"}, schema) != []
        del answer["request_id"]
        assert faults(answer, schema) != []
        if "json" in asked:
            taken = described["requestBody"]["content"]["application/json"]["schema"]
            several = await client.post("/predict", json={"rows": [ROW, ROW]})
            assert (
                faults(several.json(), schema)
                == faults(ROW, taken)
                == faults({"rows": [ROW]}, taken)
                == []
            )
            assert faults(ROW | {"age": "old"}, taken) != []
            assert faults(ROW | {"height": 1}, taken) != []

    run(make_settings(), work)


def test_real_errors_match_the_openapi_error_schema(make_settings: MakeSettings) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        document = (await client.get("/docs.json")).json()
        described = document["paths"]["/predict"]["post"]["responses"]
        for content, code in ((b"", "empty"), (b"text", "undecodable")):
            answer = await client.post(
                "/predict",
                content=content,
                headers={"content-type": "image/png", "content-length": str(len(content))},
            )
            assert faults(answer.json(), document["components"]["schemas"]["Error"]) == []
            assert code in described[str(answer.status_code)]["description"]

    run(make_settings(), work)


def test_openapi_document_lists_both_shapes_of_errors_that_may_precede_the_path(
    make_settings: MakeSettings,
) -> None:
    routes = all_routes(full_worker(make_settings()))
    document = openapi(routes, None, None, WITHOUT_KEYS)
    general, own = ({"$ref": f"#/components/schemas/{name}"} for name in ("Error", "ProtocolError"))
    answers = document["paths"]["/v2/health/ready"]["get"]["responses"]
    for status, schema in (
        ("405", own),
        ("417", own),
        ("408", {"anyOf": [own, general]}),
        ("503", {"anyOf": [own, general]}),
    ):
        assert answers[status]["content"]["application/json"]["schema"] == schema
    answers = document["paths"]["/livez"]["get"]["responses"]
    assert answers["408"]["content"]["application/json"]["schema"] == general


def test_openapi_document_lists_the_routes_that_need_an_api_key(
    make_settings: MakeSettings, certified: Path
) -> None:
    worker = full_worker(make_settings())
    routes = all_routes(worker)
    with_keys, without = (openapi(routes, None, None, check) for check in (WITH_KEYS, WITHOUT_KEYS))
    for path, item in with_keys["paths"].items():
        for method, operation in item.items():
            if method != "parameters":
                is_open = (
                    routes[path.replace("{below}", "*").replace("{name}", "*")].access == "open"
                )
                assert (operation["security"] == []) is is_open
                assert ("401" in operation["responses"]) is not is_open
                assert without["paths"][path][method]["security"] == []


def test_openapi_document_is_cached_per_model_version(
    make_settings: MakeSettings,
) -> None:
    settings = make_settings()
    asked = cast(Request, None)
    model = SimpleNamespace(bundle=SimpleNamespace(manifest=None), version="")
    worker = SimpleNamespace(settings=settings, model=None, caller_check=WITHOUT_KEYS, hooks={})
    document = routes(cast(ModelWorker, worker))["/docs.json"].handler
    assert document

    async def work() -> None:
        seen = []
        for version in (None, "first", "second", "second", "first"):
            model.version, worker.model = version, version and model
            seen.append(await document(asked))
            assert json.loads(seen[-1].body)["info"]["version"] == (version or "no model")
        assert seen[2] is seen[3]

    asyncio.run(work())


def test_openapi_schemas_are_generic_without_a_model() -> None:
    assert list(describe_predict(None).takes) == [
        "image/*",
        "application/octet-stream",
        "multipart/form-data",
    ]
    one, several = prediction_content(None)["application/json"]["oneOf"]
    assert (one["required"], several["required"]) == (
        ["model_version", "request_id"],
        ["predictions", "model_version", "request_id"],
    )


def test_docs_page_shows_a_command_for_every_operation_and_loads_nothing_external(
    make_settings: MakeSettings, asked: dict[str, Any]
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        document = (await client.get("/docs.json")).json()
        answer = await client.get("/docs", headers={"host": "127.0.0.1:3999"})
        page = unescape(answer.text)
        for path, item in document["paths"].items():
            assert all(
                f"{method.upper()} {path}" in page for method in item if method != "parameters"
            )
            assert f"http://127.0.0.1:3999{path}" in page
        assert "<script" not in answer.text
        assert not re.search(r'(src|href)="(https?:)?//', answer.text)
        assert "'unsafe-inline'" not in answer.headers["content-security-policy"]
        if "json" in asked:
            assert "curl -H 'content-type: application/json' -d '{\"age\"" in page
        else:
            assert "curl -F image=@picture.png" in page

    run(make_settings(), work)


def test_docs_page_escapes_texts_of_the_bundle() -> None:
    label = "<script>alert(1)</script>"
    operation = Operation(
        f"What {label} is.",
        answers={"application/json": {"type": "string", "enum": [label, *LABELS]}},
        example=label,
    )
    document = openapi(
        {"/x": Route(("POST",), nothing, "caller", always(operation))}, None, label, WITH_KEYS
    )
    page = render_docs(document, "localhost").decode()
    assert label not in page
    assert page.count("&lt;script&gt;") >= 3
    assert "curl -H &quot;authorization: Bearer $KEY&quot;" in page


def test_docs_page_of_the_operators_port_shows_the_main_port_to_callers() -> None:
    words = always(Operation("What is said."))
    document = openapi(
        {
            "/ask": Route(READING, nothing, "caller", words),
            "/run": Route(READING, nothing, "operator", words),
        },
        None,
        None,
        WITHOUT_KEYS,
    )
    page = render_docs(document, "127.0.0.1:3001", "HOST:PORT").decode()
    assert "curl http://HOST:PORT/ask" in page
    assert "curl http://127.0.0.1:3001/run" in page
