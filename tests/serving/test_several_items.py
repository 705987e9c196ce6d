"""Several images in one request."""

import asyncio
import io
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from slipway.inputs.images import array_from_bytes
from slipway.inputs.multipart import encode_images
from slipway.replay.backends import decode_payload
from slipway.serving.worker import ModelWorker
from slipway.traffic.request_log import LoggedRequest, digest_inputs, read_requests
from tests.serving.bundles import (
    CLASS_FIELDS,
    CONTRACT,
    certify,
    log_of_mean,
    picture,
    probabilities,
    write_bundle,
)
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import error_of, metric, run

Files = list[tuple[str, tuple[str, bytes, str]]]


def files(*payloads: bytes) -> Files:
    return [
        ("image", (f"{number}.png", payload, "image/png"))
        for number, payload in enumerate(payloads)
    ]


def test_several_images_get_the_predictions_of_single_images_in_order(
    make_settings: MakeSettings,
) -> None:
    payloads = [
        picture(number, (9 + number % 5, 12)) for number in range(40)
    ]  # more than the largest batch

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        content = (
            await client.post("/predict", files=files(*payloads), headers={"x-request-id": "mine"})
        ).json()
        assert list(content) == ["predictions", "model_version", "request_id"]
        assert content["request_id"] == "mine"
        expected = probabilities(
            np.stack([array_from_bytes(payload, CONTRACT) for payload in payloads])
        )
        assert np.allclose(
            [list(one["probabilities"].values()) for one in content["predictions"]],
            expected,
            atol=1e-6,
        )
        assert [list(one) for one in content["predictions"]] == [CLASS_FIELDS] * 40
        alone = (await client.post("/predict", files=files(payloads[7]))).json()
        assert {name: alone[name] for name in CLASS_FIELDS} == content["predictions"][7]
        assert metric(worker, "slipway_batch_size_sum") == 41

    run(make_settings(), work)


def test_a_bad_image_refuses_only_its_request_and_names_its_position(
    make_settings: MakeSettings,
) -> None:
    good, bad = [picture(1), picture(2)], [picture(1), picture(3, (64, 64))[:-400], b"", picture(2)]

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        for _ in range(5):
            answers = await asyncio.gather(
                *(
                    client.post("/predict", files=files(*(bad if n == 3 else good)))
                    for n in range(8)
                )
            )
            error = error_of(answers.pop(3))
            assert (error["code"], error["field"]) == ("truncated", "image[1]")
            assert all(answer.status_code == 200 for answer in answers)
            predictions = [answer.json()["predictions"] for answer in answers]
            assert predictions == [predictions[0]] * 7
        assert (
            metric(worker, "slipway_batch_size_sum") == 5 * 7 * 2
        )  # nothing of the bad request reached the model

    run(make_settings(), work)


def test_non_finite_prediction_fails_only_its_own_request(
    certified: Path, make_settings: MakeSettings
) -> None:
    certify(certified / "certificate.json", write_bundle(certified / "bundle", log_of_mean()))
    stream = io.BytesIO()
    Image.new("RGB", (8, 8)).save(stream, "PNG")

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        good, bad = await asyncio.gather(
            client.post("/predict", files=files(picture(1), picture(2))),
            client.post("/predict", files=files(picture(1), stream.getvalue())),
        )
        assert good.status_code == 200
        assert error_of(bad)["code"] == "invalid_answer"

    run(make_settings(), work)


def test_request_may_contain_images_up_to_the_limit_and_more_get_413(
    make_settings: MakeSettings,
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        at_the_limit = await client.post("/predict", files=files(*[picture()] * 3))
        assert len(at_the_limit.json()["predictions"]) == 3
        error = error_of(await client.post("/predict", files=files(*[picture()] * 4)))
        assert (error["code"], error["field"]) == ("too_many_items", "image")

    run(make_settings(max_items=3), work)


def test_several_images_are_logged_as_a_body_that_can_be_sent_again(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    payloads = [picture(1), picture(2, (30, 20), "JPEG"), picture(3, (12, 12), "BMP")]
    answers = []

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        answers.append(
            (await client.post("/predict", files=files(*payloads))).json()["predictions"]
        )

    run(make_settings(request_log_directory=tmp_path / "log"), work)
    (kept,) = read_requests(tmp_path / "log")
    assert isinstance(kept, LoggedRequest)
    assert (kept.content_type, kept.payload) == encode_images(payloads)
    assert (kept.is_list, kept.num_rows) == (True, 3)
    assert (
        digest_inputs(decode_payload(kept.content_type, kept.payload, CONTRACT))
        == kept.inputs_sha256
    )

    async def again(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        answer = await client.post(
            "/predict", content=kept.payload, headers={"content-type": kept.content_type}
        )
        assert answer.json()["predictions"] == answers[0] == kept.answers

    run(make_settings(), again)


@pytest.mark.parametrize("number", [2, 3])
def test_form_of_several_images_occupies_one_place_in_the_queue(
    make_settings: MakeSettings, number: int
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        assert (
            await client.post("/predict", files=files(*[picture()] * number))
        ).status_code == 200

    run(make_settings(max_queue=1), work)
