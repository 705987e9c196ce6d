"""`POST /explain`, with models whose relevant inputs are known."""

import asyncio
import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from slipway.inputs.columns import encode_rows, positions_of, read_row
from slipway.inputs.images import array_from_bytes
from slipway.predictor.explaining.explanation import background_vectors
from slipway.predictor.explaining.occlusion import covered, side_for
from slipway.predictor.explaining.pictures import overlay
from slipway.serving.explaining.extension import BATCH_SECONDS
from slipway.serving.models.admission import Admission
from slipway.serving.models.observers import Noted
from slipway.serving.worker import ModelWorker
from tests.serving import bundles
from tests.serving.bundles import (
    COLUMNS,
    CONTRACT,
    LABELS,
    ROW,
    SIZE_PX,
    certify,
    picture,
    row_probabilities,
    row_sum,
    write_bundle,
)
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import error_of, metric, put_in_place_of, run
from tests.serving.test_app import slow_down

PNG = {"content-type": "image/png"}
QUEUE_FULL = 'slipway_errors_total{error="queue_full"}'
USUAL: dict[str, Any] = {
    "age": 38.5,
    "income": 30000,
    "colour": "red",
    "city": "O'Hare <b>",
    "member": False,
    "since": "2019-07-23",
}


def corner_reader(corner_px: int = 2) -> onnx.ModelProto:
    """Return a classifier for which a brighter upper left corner makes "bright" more probable."""
    weights = np.zeros((SIZE_PX, SIZE_PX, 3, len(LABELS)), dtype=np.float32)
    weights[:corner_px, :corner_px, :, 2] = 1 / 1500
    nodes = [
        helper.make_node("Cast", ["image"], ["pixels"], to=TensorProto.FLOAT),
        helper.make_node("Flatten", ["pixels"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weights"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
    ]
    return bundles._model(
        nodes,
        [numpy_helper.from_array(weights.reshape(-1, len(LABELS)), "weights")],
        "probabilities",
        len(LABELS),
    )


def bright_corner() -> bytes:
    """Return a picture that is bright in the upper left corner and dark elsewhere."""
    pixels = np.full((SIZE_PX, SIZE_PX, 3), 10, dtype=np.uint8)
    pixels[:2, :2] = 250
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def decoded(png: str) -> NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(png))))


def test_occlusion_finds_the_corner_that_determines_the_prediction(
    certified: Path, make_settings: MakeSettings
) -> None:
    certify(certified / "certificate.json", write_bundle(certified / "bundle", corner_reader()))

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        answer = (await client.post("/explain", content=bright_corner(), headers=PNG)).json()
        explanation, changes = answer["explanation"], np.array(answer["explanation"]["changes"])
        assert (answer["label"], explanation["of"], explanation["kind"], explanation["rows"]) == (
            "bright",
            "bright",
            "occlusion",
            64,
        )
        assert explanation["answer"] == answer["probabilities"]["bright"]
        assert changes.shape == (8, 8)
        assert changes.max() > 0.05
        assert divmod(int(changes.argmax()), 8) in [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert not changes[3:].any()  # what is covered there does not touch the corner
        assert not changes[:, 3:].any()
        seen = decoded(explanation["input_png"])
        assert np.array_equal(seen, array_from_bytes(bright_corner(), CONTRACT))
        heat = decoded(explanation["overlay_png"]).astype(int)
        redness = heat[..., 0] - heat[..., 2]
        assert redness[: heat.shape[0] // 4, : heat.shape[1] // 4].mean() > 40
        assert not redness[heat.shape[0] // 2 :].any()

    run(make_settings(), work)


def test_occlusion_finds_no_corner_for_a_model_that_uses_the_whole_image(
    make_settings: MakeSettings,
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        changes = np.array(
            (await client.post("/explain", content=picture(), headers=PNG)).json()["explanation"][
                "changes"
            ]
        )
        assert (changes[3:] != 0).all()

    run(make_settings(), work)


def test_explain_returns_the_same_prediction_as_predict(make_settings: MakeSettings) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        predicted = (await client.post("/predict", content=picture(4), headers=PNG)).json()
        explained = (
            await client.post(
                "/explain", content=picture(4), headers=PNG | {"x-request-id": "mine"}
            )
        ).json()
        assert explained.pop("explanation")
        assert explained.pop("request_id") == "mine"
        assert explained == {
            name: value for name, value in predicted.items() if name != "request_id"
        }

    run(make_settings(), work)


def test_contributions_of_columns_to_a_sum_equal_its_terms(
    certified: Path, make_settings: MakeSettings
) -> None:
    certify(certified / "certificate.json", write_bundle(certified / "bundle", row_sum()))
    given, usual = (encode_rows([read_row(row, COLUMNS)], COLUMNS)[0] for row in (ROW, USUAL))
    terms = [float((given - usual)[places].sum()) for places in positions_of(COLUMNS)]

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        assert (await client.get("/model")).json()["input"]["example"] == USUAL
        explanation = (await client.post("/explain", json=ROW)).json()["explanation"]
        assert (explanation["kind"], explanation["of"], explanation["method"]) == (
            "columns",
            "value",
            "exact",
        )
        assert [column["name"] for column in explanation["columns"]] == list(ROW)
        for name in ("change", "contribution"):
            assert np.allclose(
                [column[name] for column in explanation["columns"]], terms, atol=1e-4
            )
        assert explanation["answer"] - explanation["usual_answer"] == pytest.approx(
            sum(terms), abs=1e-4
        )

    run(make_settings(), work)


def test_contributions_are_relative_to_the_mean_answer_to_rows_of_the_training_data(
    certified: Path, make_settings: MakeSettings
) -> None:
    others = [
        ROW | {"age": 20 + number, "colour": ("red", "green")[number % 2], "income": None}
        for number in range(8)
    ]
    contract = COLUMNS.model_copy(update={"background": others})
    certify(
        certified / "certificate.json",
        write_bundle(certified / "bundle", row_sum(), input=contract),
    )
    given = encode_rows([read_row(ROW, COLUMNS)], COLUMNS)[0]
    mean = encode_rows([read_row(row, COLUMNS) for row in others], COLUMNS).mean(axis=0)
    terms = [float((given - mean)[places].sum()) for places in positions_of(COLUMNS)]

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        described = (await client.get("/model")).json()["input"]
        assert (described["example"], described["background_rows"]) == (others[0], 8)
        explanation = (await client.post("/explain", json=ROW)).json()["explanation"]
        assert (explanation["background_rows"], explanation["method"]) == (8, "exact")
        for name in ("change", "contribution"):
            found = {column["name"]: column[name] for column in explanation["columns"]}
            assert np.allclose(list(found.values()), terms, atol=1e-4)
            assert found["colour"]  # half of the rows have another one
            assert not found["city"]  # all rows have this one
        difference = explanation["answer"] - explanation["usual_answer"]
        assert difference == pytest.approx(sum(terms), abs=1e-4)

    run(make_settings(), work)


def test_contributions_of_columns_to_a_label_add_up_including_a_missing_value(
    certified_table: Path, make_settings: MakeSettings
) -> None:
    row = {name: value for name, value in ROW.items() if name != "income"}

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        answer = (await client.post("/explain", json={"rows": [row]})).json()
        explanation = answer["explanation"]
        contributions = {
            column["name"]: column["contribution"] for column in explanation["columns"]
        }
        label = LABELS.index(answer["label"])
        usual = float(row_probabilities(background_vectors(COLUMNS))[0, label])
        assert explanation["usual_answer"] == pytest.approx(usual, abs=1e-6)
        assert sum(contributions.values()) == pytest.approx(explanation["answer"] - usual, abs=1e-6)
        assert contributions["income"] != 0  # only its indicator is not as usual

    run(make_settings(), work)


def test_columns_with_typical_values_contribute_nothing_and_need_no_model_rows(
    certified_table: Path, make_settings: MakeSettings
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        explanation = (await client.post("/explain", json=USUAL | {"member": True})).json()[
            "explanation"
        ]
        assert [
            column["name"]
            for column in explanation["columns"]
            if column["change"] or column["contribution"]
        ] == ["member"]
        assert explanation["rows"] == 2  # without it and with it
        usual = (await client.post("/explain", json=USUAL)).json()["explanation"]
        assert not any(column["change"] for column in usual["columns"])
        assert usual["answer"] == usual["usual_answer"]

    run(make_settings(), work)


def test_explanation_of_many_columns_samples_the_same_subsets_each_time(
    certified: Path, make_settings: MakeSettings
) -> None:
    names = [f"n{number}" for number in range(COLUMNS.shape[0] + 5)]
    contract = COLUMNS.model_copy(update={"columns": [bundles.column(name) for name in names]})
    rng = np.random.default_rng(2)
    weights = rng.normal(size=(len(names), len(LABELS))).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["row", "weights"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
    ]
    taken = helper.make_tensor_value_info("row", TensorProto.FLOAT, ["N", len(names)])
    graph = bundles._model(
        nodes, [numpy_helper.from_array(weights, "weights")], "probabilities", len(LABELS), taken
    )
    certify(
        certified / "certificate.json", write_bundle(certified / "bundle", graph, input=contract)
    )
    row = {
        name: float(value)
        for name, value in zip(names, rng.normal(40, 12, len(names)), strict=True)
    }

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        first, again = [
            (await client.post("/explain", json=row)).json()["explanation"] for _ in range(2)
        ]
        assert first == again
        assert (first["method"], first["orders"] % 2) == ("sampled", 0)
        total = sum(column["contribution"] for column in first["columns"])
        assert total == pytest.approx(first["answer"] - first["usual_answer"], abs=1e-5)
        assert 0 < max(column["standard_error"] for column in first["columns"]) < 0.1
        assert first["rows"] <= 1024 + len(names) + 1

    run(make_settings(), work)


def test_explain_refuses_several_items(certified_table: Path, make_settings: MakeSettings) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        error = error_of(await client.post("/explain", json={"rows": [ROW, ROW]}))
        assert error["code"] == "not_one_item"
        assert "2 items" in error["message"]

    run(make_settings(), work)


def test_explain_refuses_the_same_requests_as_predict(make_settings: MakeSettings) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        for content, headers in (
            (b"bad", PNG),
            (b"", PNG),
            (b"{}", {"content-type": "application/json"}),
        ):
            codes = [
                error_of(await client.post(path, content=content, headers=headers))["code"]
                for path in ("/predict", "/explain")
            ]
            assert codes[0] == codes[1]

    run(make_settings(), work)


def test_a_second_explanation_is_refused_until_the_first_ends(
    make_settings: MakeSettings,
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        await slow_down(worker, 0.005)
        answers = await asyncio.gather(
            *(client.post("/explain", content=picture(n), headers=PNG) for n in range(4))
        )
        refused = [answer for answer in answers if answer.status_code != 200]
        assert len(refused) == 3
        for answer in refused:
            assert error_of(answer)["code"] == "explain_busy"
            assert answer.headers["retry-after"] == "1"
        assert (await client.post("/explain", content=b"bad", headers=PNG)).status_code == 422
        assert (await client.post("/explain", content=picture(), headers=PNG)).status_code == 200

    run(make_settings(), work)


def test_overload_refuses_explanations_and_counts_no_refused_prediction(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Admission, "is_overloaded_now", lambda self: True)

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        refused = await client.post("/explain", content=picture(), headers=PNG)
        assert error_of(refused)["code"] == "explain_busy"
        assert "predictions go first" in error_of(refused)["message"]
        assert refused.headers["retry-after"] == "1"
        assert worker.admission._num_refused == 0
        assert (
            metric(worker, QUEUE_FULL),
            metric(worker, 'slipway_errors_total{error="explain_busy"}'),
        ) == (0, 1)

    run(make_settings(), work)


@pytest.mark.process
def test_an_explanation_evicted_from_the_queue_counts_no_refused_prediction(
    make_settings: MakeSettings,
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        sizes = await slow_down(worker, 0.2)
        assert worker._live
        predicting = asyncio.create_task(client.post("/predict", content=picture(), headers=PNG))
        while not sizes:
            await asyncio.sleep(0.001)
        explaining = asyncio.create_task(client.post("/explain", content=picture(), headers=PNG))
        while not worker._live.batcher.num_waiting:
            await asyncio.sleep(0.001)
        worker._shed(0)
        refused = await explaining
        assert error_of(refused)["code"] == "explain_busy"
        assert refused.headers["retry-after"] == "1"
        assert (await predicting).status_code == 200
        assert metric(worker, QUEUE_FULL) == 0
        assert (await client.post("/explain", content=picture(), headers=PNG)).status_code == 200

    run(make_settings(), work)


@pytest.mark.process
def test_live_requests_wait_for_at_most_one_small_batch_of_an_explanation(
    make_settings: MakeSettings,
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        sizes = await slow_down(worker, BATCH_SECONDS * 1.1)  # so slow that a copy goes alone
        explaining = asyncio.create_task(client.post("/explain", content=picture(), headers=PNG))
        while len(sizes) < 2:
            await asyncio.sleep(0.001)
        before = len(sizes)
        assert all(
            answer.status_code == 200
            for answer in [
                await client.post("/predict", content=picture(n), headers=PNG) for n in range(3)
            ]
        )
        assert len(sizes) - before <= 3 * 3  # each: what runs, its own, and one that came between
        assert max(sizes) <= 2
        assert (await explaining).status_code == 200
        assert (
            sum(sizes) == 3 + 64 + 3
        )  # the item three times, to see how long it takes, its copies, and the live ones

    run(make_settings(), work)


def test_no_rows_of_an_explanation_run_while_requests_wait(make_settings: MakeSettings) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        sizes = await slow_down(worker, 0.05)
        assert worker._live
        batcher = worker._live.batcher
        explaining = asyncio.create_task(client.post("/explain", content=picture(), headers=PNG))
        while sum(sizes) < 3:
            await asyncio.sleep(0.01)
        busy = [
            asyncio.create_task(client.post("/predict", content=picture(n), headers=PNG))
            for n in range(60)
        ]
        while batcher.num_waiting < 17:  # more than a batch takes
            await asyncio.sleep(0.001)
        copies_before = sum(sizes)
        while batcher.num_waiting:
            await asyncio.sleep(0.001)
        assert sum(sizes) - copies_before <= 60 + 1
        await asyncio.gather(*busy)
        explaining.cancel()

    run(make_settings(), work)


@pytest.mark.parametrize(("seconds", "side"), [(0.0, 8), (0.02, 4), (0.1, 2)])
def test_a_slow_model_is_explained_with_fewer_rows(
    make_settings: MakeSettings, seconds: float, side: int
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        if seconds:
            await slow_down(worker, seconds)
        explanation = (await client.post("/explain", content=picture(), headers=PNG)).json()[
            "explanation"
        ]
        assert (len(explanation["changes"]), explanation["rows"]) == (side, side * side)

    run(make_settings(request_timeout_s=1.6), work)


@pytest.mark.process
def test_an_explanation_past_its_deadline_is_504_and_leaves_nothing_running(
    make_settings: MakeSettings,
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        sizes = await slow_down(worker, 0.15)
        error = error_of(await client.post("/explain", content=picture(), headers=PNG))
        assert error["code"] == "deadline_exceeded"
        assert "live requests go first" in error["message"]
        asked = len(sizes)
        await asyncio.sleep(0.5)
        assert len(sizes) <= asked + 1  # what was running
        assert (
            error_of(await client.post("/explain", content=picture(), headers=PNG))["code"]
            == "deadline_exceeded"
        )  # not busy

    run(make_settings(request_timeout_s=0.4), work)


def test_model_failure_during_an_explanation_returns_500(
    make_settings: MakeSettings,
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        assert worker._live
        right, calls = worker._live.batcher._run, []

        def fail_later(batch: Any) -> Any:
            calls.append(len(batch))
            if len(calls) > 3:
                raise RuntimeError("planted")
            return right(batch)

        put_in_place_of(worker._live, fail_later)
        assert (
            error_of(await client.post("/explain", content=picture(), headers=PNG))["code"]
            == "model_failed"
        )

    run(make_settings(), work)


def test_an_explanation_does_not_count_as_a_prediction(make_settings: MakeSettings) -> None:
    class Noting:
        def __init__(self) -> None:
            self.offered: list[Noted] = []

        def offer(self, answered: Sequence[Noted], moment: float) -> None:
            self.offered += answered

        def close(self) -> None:
            pass

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        noting = Noting()
        worker.observers.all = [noting]
        assert (await client.post("/explain", content=picture(), headers=PNG)).status_code == 200
        assert noting.offered == []
        assert metric(worker, "slipway_prediction_duration_seconds_count") == 0
        assert metric(worker, 'slipway_requests_total{code="200",route="/explain"}') == 1
        assert (await client.post("/predict", content=picture(), headers=PNG)).status_code == 200
        await asyncio.sleep(0)
        assert len(noting.offered) == 1

    run(make_settings(), work)


def test_occlusion_covers_each_grid_cell_once_with_its_surroundings() -> None:
    pixels = array_from_bytes(picture(3, (SIZE_PX, SIZE_PX)), CONTRACT)
    for side in (8, 4, 2):
        copies = covered(pixels, side)
        assert copies.shape == (side * side, SIZE_PX, SIZE_PX, 3)
        changed = (copies != pixels).any(axis=-1)
        place_px = SIZE_PX // side
        for number in range(side * side):
            rows, columns = np.nonzero(changed[number])
            top, left = (number // side) * place_px, (number % side) * place_px
            assert rows.min() >= top - place_px
            assert rows.max() < top + 2 * place_px
            assert columns.min() >= left - place_px
            assert columns.max() < left + 2 * place_px
        assert changed.any(axis=0).mean() > 0.95  # a pixel may be equal to its blurred self


@pytest.mark.parametrize(
    ("most_rows", "size_px", "side"),
    [(1024, 28, 8), (64, 28, 8), (63, 28, 4), (16, 28, 4), (4, 28, 2), (0, 28, 2), (64, 3, 3)],
)
def test_the_occlusion_grid_is_the_finest_that_the_time_allows(
    most_rows: int, size_px: int, side: int
) -> None:
    assert side_for(most_rows, size_px) == side


@pytest.mark.parametrize("channels", [1, 3])
def test_overlay_distinguishes_regions_for_against_and_neutral(channels: int) -> None:
    pixels = np.full((16, 16, channels), 100, dtype=np.uint8)
    changes = np.array([[0.4, -0.2], [0.0, 0.0]])
    shown = overlay(pixels, changes).astype(int)
    assert shown.shape == (256, 256, 3)
    assert shown[10, 10, 0] > shown[10, 10, 2] + 80
    assert shown[10, 245, 2] > shown[10, 245, 0] + 30
    assert np.array_equal(overlay(pixels, np.zeros((2, 2))), np.full((256, 256, 3), 100))


def test_the_typical_row_is_the_example_row_of_the_model() -> None:
    assert np.array_equal(
        background_vectors(COLUMNS), encode_rows([read_row(USUAL, COLUMNS)], COLUMNS)
    )


def test_positions_of_columns_cover_each_number_of_the_encoded_row_once() -> None:
    places = [place for column in positions_of(COLUMNS) for place in column]
    assert sorted(places) == list(range(COLUMNS.shape[0]))
