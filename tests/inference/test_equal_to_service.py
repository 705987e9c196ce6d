"""`slipway.load` against a real service of the same bundle."""

from pathlib import Path

import httpx
import onnx
import pytest

from slipway.inference.client import Client
from slipway.inference.local import load
from slipway.inference.predictions import explanation_of, prediction_of
from tests.sentences import hostile_texts
from tests.serving.bundles import (
    classifier,
    picture,
    row_classifier,
    table_row,
    text_classifier,
)
from tests.serving.ready_service import ready_service

pytestmark = pytest.mark.process
NUM_ITEMS = 40  # more than the largest batch


@pytest.mark.parametrize(
    "graph",
    [classifier(), row_classifier(), text_classifier()],
    ids=["images", "rows", "texts"],
)
def test_answers_equal_those_over_http_bit_for_bit(graph: onnx.ModelProto, tmp_path: Path) -> None:
    name = graph.graph.input[0].name
    is_table = name != "image"
    images = [picture(number, (9 + number % 5, 12)) for number in range(NUM_ITEMS)]
    rows = [table_row(number) for number in range(NUM_ITEMS)]
    if name == "text":
        rows = [{"text": text} for text in hostile_texts(NUM_ITEMS, seed=4)]
    with (
        ready_service(tmp_path, graph) as server,
        load(tmp_path) as model,
        httpx.Client(base_url=server.url, trust_env=False) as http,
    ):
        if is_table:
            many = http.post("/predict", json={"rows": rows})
            single, explained = (http.post(path, json=rows[1]) for path in ("/predict", "/explain"))
            found, one, local = model.predict(rows), model.predict(rows[1]), model.explain(rows[1])
        else:
            files = [("image", (f"{n}.png", image, "image/png")) for n, image in enumerate(images)]
            many = http.post("/predict", files=files)
            headers = {"content-type": "image/png"}
            single, explained = (
                http.post(path, content=images[1], headers=headers)
                for path in ("/predict", "/explain")
            )
            found, one = model.predict(images), model.predict(images[1])
            local = model.explain(images[1])
        assert found == [prediction_of(answer) for answer in many.json()["predictions"]]
        assert one == prediction_of(single.json())
        expected = explanation_of(explained.json())
        assert (local.prediction, local.of, local.kind) == (one, expected.of, expected.kind)
        assert local.answer == expected.answer
        with Client(server.url) as client:
            assert client.predict(rows if is_table else images) == found
            assert client.explain(rows[1] if is_table else images[1]).prediction == one
            info = client.info()
        here = model.info()
        assert info["execution"]["actual"] == here["execution"]["actual"]
        assert info["execution"]["num_threads"] == here["execution"]["num_threads"]
        assert info["execution"]["session_options"] == here["execution"]["session_options"]
        assert info["bundle_digest"] == here["bundle_digest"]
