"""A ready service serves its first requests like all others; earlier ones get a retry time."""

import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from numpy.typing import NDArray

from slipway.artifacts.uncertainty import Answers
from slipway.runtimes.runtime import OnnxRunner
from slipway.serving.load_test.load import ask_each, by_status, http_request
from slipway.serving.models.loader import load_model
from tests import plain_http
from tests.serving.bundles import certify, picture, slow_classifier, write_bundle
from tests.serving.conftest import MakeSettings
from tests.serving.server import running

PNG = {"content-type": "image/png"}


def test_each_batch_size_has_run_before_a_model_is_ready(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    run = OnnxRunner.run

    def recording(self: OnnxRunner, batch: NDArray[Any]) -> Answers:
        sizes.append(len(batch))
        return run(self, batch)

    monkeypatch.setattr(OnnxRunner, "run", recording)
    load_model(make_settings(max_batch_size=12))
    assert {1, 2, 4, 8, 12} <= set(sizes)
    assert max(sizes) == 12


@pytest.mark.process
@pytest.mark.parametrize("num_workers", [1, 2])
def test_none_of_the_first_100_requests_fails_and_earlier_ones_get_retry_after(
    tmp_path: Path, num_workers: int
) -> None:
    certify(tmp_path / "certificate.json", write_bundle(tmp_path / "bundle", slow_classifier(8)))
    with running(tmp_path, workers=num_workers) as server:
        ready, deadline = False, time.monotonic() + 60
        while not ready and time.monotonic() < deadline:
            try:
                early = plain_http.post(server.url + "/predict", content=picture(), headers=PNG)
                ready = plain_http.get(server.url + "/readyz").status_code == 200
            except httpx.TransportError:  # nobody listens yet
                continue
            if early.status_code != 200:  # it may have become ready in between
                assert (early.status_code, early.json()["error"]["code"]) == (503, "not_ready")
                assert int(early.headers["retry-after"]) >= 1
        assert ready
        assert by_status(
            ask_each(server.url, [http_request(body=picture(number)) for number in range(100)], 32)
        ) == {200: 100}
