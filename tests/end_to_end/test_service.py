"""The certified service as a real process, and as a bento in another folder."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from slipway.artifacts.bundle import load_bundle
from tests import plain_http
from tests.end_to_end.project import SHAPES, Project, wait_until_ready

pytestmark = pytest.mark.process


def first_picture(project: Project) -> Path:
    return sorted((project.path / "data" / "own" / "cross").glob("*.png"))[0]


def test_the_service_answers_with_the_certified_model(finished: Project, service: str) -> None:
    answer = plain_http.post(
        f"{service}/predict", files={"image": first_picture(finished).read_bytes()}
    )
    card = plain_http.get(f"{service}/model").json()
    assert answer.status_code == 200, answer.text
    content = answer.json()
    assert content["label"] == "cross"
    assert set(content["probabilities"]) == set(SHAPES)
    assert content["model_version"] == load_bundle(finished.path / "artifacts/bundle").version
    assert card["execution"]["actual"]["provider"] == "cpu"


def test_wrong_requests_get_one_error_shape_and_the_next_right_one_is_answered(
    finished: Project, service: str
) -> None:
    wrong = [
        plain_http.post(f"{service}/predict", content=b"", headers={"content-type": "image/png"}),
        plain_http.post(
            f"{service}/predict", content=b"hello", headers={"content-type": "image/png"}
        ),
        plain_http.post(
            f"{service}/predict", content=b"hello", headers={"content-type": "text/plain"}
        ),
        plain_http.post(f"{service}/predict", json={"image": "http://127.0.0.1/a.png"}),
        plain_http.get(f"{service}/predict"),
        plain_http.get(f"{service}/nowhere"),
    ]
    right = plain_http.post(
        f"{service}/predict",
        content=first_picture(finished).read_bytes(),
        headers={"content-type": "image/png"},
    )
    for answer in wrong:
        assert 400 <= answer.status_code < 500, answer.text
        assert set(answer.json()) == {"error"}
        assert set(answer.json()["error"]) == {"code", "message", "field", "request_id"}
    assert right.json()["label"] == "cross"


def test_a_bundle_with_one_changed_byte_is_never_ready(finished: Project, tmp_path: Path) -> None:
    tampered = tmp_path / "bundle"
    subprocess.run(["cp", "-rL", finished.path / "artifacts/bundle", tampered], check=True)
    subprocess.run(["chmod", "-R", "u+w", tampered], check=True)
    model = tampered / "model_fp32.onnx"
    payload = bytearray(model.read_bytes())
    payload[len(payload) // 2] ^= 1
    model.write_bytes(payload)
    with finished.service(
        SLIPWAY_BUNDLE=str(tampered), SLIPWAY_STATE=str(tmp_path / "state")
    ) as address:
        deadline = time.monotonic() + 30
        while (
            "model_fp32.onnx was altered" not in (ready := plain_http.get(f"{address}/readyz")).text
        ):
            assert ready.status_code == 503  # it is looking still
            assert time.monotonic() < deadline, ready.text
            time.sleep(0.1)
        answer = plain_http.post(
            f"{address}/predict",
            content=first_picture(finished).read_bytes(),
            headers={"content-type": "image/png"},
        )
    assert ready.status_code == 503
    assert answer.status_code == 503


def test_a_built_bento_serves_from_an_empty_folder(finished: Project, tmp_path: Path) -> None:
    tag = (
        finished.shell("bentoml build --output tag")
        .strip()
        .splitlines()[-1]
        .removeprefix("__tag__:")
    )
    elsewhere = Project(tmp_path / "elsewhere")
    elsewhere.path.mkdir()
    (elsewhere.path / ".venv").symlink_to(sys.prefix)
    (elsewhere.path / ".bentoml").symlink_to(finished.path / ".bentoml")
    with elsewhere.service(f"bentoml serve {tag}") as address:
        wait_until_ready(address)
        answer = plain_http.post(
            f"{address}/predict", files={"image": first_picture(finished).read_bytes()}
        )
    assert answer.json()["label"] == "cross"
