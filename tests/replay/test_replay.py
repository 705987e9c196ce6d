"""Replay of a logged request: names exactly the backend with the planted fault."""

import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from slipway.artifacts.bundle import (
    DataSource,
    Lineage,
    LoadedBundle,
    describe_model,
    load_bundle,
    write_manifest,
)
from slipway.inputs.images import array_from_bytes
from slipway.replay.__main__ import main
from slipway.serving.worker import ModelWorker
from slipway.traffic.request_log import SegmentWriter, encode_line, find_requests
from tests.conftest import ROOT
from tests.serving.bundles import (
    COLUMNS,
    LABELS,
    WEIGHTS,
    certify,
    classifier,
    gate,
    log_of_mean,
    picture,
    row_classifier,
    table_row,
    write_bundle,
)
from tests.serving.conftest import MakeSettings, make_settings
from tests.serving.in_process import run

__all__ = ["make_settings"]  # a fixture
PNG = {"content-type": "image/png"}
Replayed = Callable[..., tuple[int, str, str]]


@pytest.fixture
def certified(tmp_path: Path) -> Path:
    """A folder with `artifacts/bundle` and its certificate, as a project has it."""
    artifacts = tmp_path / "artifacts"
    certify(artifacts / "certificate.json", write_bundle(artifacts / "bundle"))
    return artifacts


@pytest.fixture
def replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Replayed:
    """Runs the command in the project's folder: exit code, output, errors."""

    def run_command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.argv", ["replay", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, said.out, said.err

    monkeypatch.setenv("SLIPWAY_REQUEST_LOG_DIRECTORY", "log")
    return run_command


def serve(settings: Any, *requests: dict[str, Any]) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        for request in requests:
            assert (await client.post("/predict", **request)).status_code == 200

    run(settings, work)


def image(request_id: str = "one", seed: int = 0) -> dict[str, Any]:
    return {"content": picture(seed, (20, 12)), "headers": PNG | {"x-request-id": request_id}}


def verdicts(output: str) -> dict[str, str]:
    """The last word of each line of the table."""
    table = output.split("\n\n")[1].splitlines()[1:]
    return {line.split()[0]: line.split()[-1] for line in table if ":" not in line.split()[0]}


def test_replay_of_a_healthy_request_agrees_on_every_backend(
    make_settings: MakeSettings, tmp_path: Path, replayed: Replayed
) -> None:
    serve(make_settings(request_log_directory=tmp_path / "log"), image())
    code, output, _ = replayed("one")
    assert code == 0
    assert verdicts(output) == {
        "decode": "equal",
        "torch": "executed",
        "onnxruntime/cpu/fp32": "reference",
        "onnxruntime/cuda/fp32": "executed",
        "tensorrt": "executed",
        "recorded": "equal",
        "service": "executed",
    }
    assert output.endswith("equal: 3 backends agree\n")
    assert "torch: the bundle does not name the digest of its weights" in output
    assert "service: no --url was given" in output


def test_replay_of_table_rows_and_numeric_targets_agrees(
    certified: Path, make_settings: MakeSettings, tmp_path: Path, replayed: Replayed
) -> None:
    certify(certified / "certificate.json", write_bundle(certified / "bundle", row_classifier()))
    many = {
        "json": {"rows": [table_row(number) for number in range(40)]},
        "headers": {"x-request-id": "many"},
    }
    serve(
        make_settings(request_log_directory=tmp_path / "log"), many
    )  # more than the largest batch
    code, output, _ = replayed("many")
    assert (code, verdicts(output)["recorded"]) == (0, "equal")
    assert "40 rows" in output

    certify(certified / "certificate.json", write_bundle(certified / "bundle", log_of_mean()))
    serve(make_settings(request_log_directory=tmp_path / "log"), image("number"))
    code, output, _ = replayed("number")
    assert (code, verdicts(output)["recorded"]) == (0, "equal")


def test_replay_accepts_columns_that_training_ignored(
    certified: Path, make_settings: MakeSettings, tmp_path: Path, replayed: Replayed
) -> None:
    contract = COLUMNS.model_copy(update={"ignored": ["customer"]})
    certify(
        certified / "certificate.json",
        write_bundle(certified / "bundle", row_classifier(), input=contract),
    )
    request = {"json": table_row(1) | {"customer": 17}, "headers": {"x-request-id": "one"}}
    serve(make_settings(request_log_directory=tmp_path / "log"), request)
    code, output, _ = replayed("one")
    assert (code, verdicts(output)["recorded"]) == (0, "equal")


def with_variant(root: Path, variant: str, change: Callable[[Any], Any]) -> LoadedBundle:
    """The bundle with one more graph, whose weights are changed."""
    bundle = load_bundle(root)
    graph = classifier()
    graph.graph.initializer[0].CopyFrom(
        numpy_helper.from_array(change(WEIGHTS).astype(np.float32), "weights")
    )
    onnx.save(graph, root / f"model_{variant}.onnx")
    model = describe_model(root / f"model_{variant}.onnx", "fp16", ["cpu"])
    write_manifest(
        root,
        bundle.manifest.model_copy(update={"models": bundle.manifest.models | {variant: model}}),
    )
    return load_bundle(root)


@pytest.mark.parametrize(("factor", "code"), [(-1.0, 1), (1.001, 0)])
def test_replay_names_a_variant_that_predicts_another_label(
    certified: Path,
    make_settings: MakeSettings,
    tmp_path: Path,
    replayed: Replayed,
    factor: float,
    code: int,
) -> None:
    certify(
        certified / "certificate.json",
        with_variant(certified / "bundle", "fp16", lambda weights: weights * factor),
    )
    serve(make_settings(request_log_directory=tmp_path / "log"), image())
    found, output, _ = replayed("one")
    assert found == code
    assert verdicts(output)["onnxruntime/cpu/fp16"] == ("diverged" if code else "equal")
    assert verdicts(output)["recorded"] == "equal"
    if code:
        assert (
            "\ndiverged at onnxruntime/cpu/fp16 from onnxruntime/cpu/fp32: the label is " in output
        )


def test_replay_reports_divergence_in_decoding(
    make_settings: MakeSettings, tmp_path: Path, replayed: Replayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(
            "slipway.serving.requests.decoding.array_from_bytes",
            lambda *arguments: array_from_bytes(*arguments)[:, :, ::-1],
        )
        serve(make_settings(request_log_directory=tmp_path / "log"), image())
    code, output, _ = replayed("one")
    assert code == 1
    assert (verdicts(output)["decode"], verdicts(output)["recorded"]) == ("diverged", "diverged")
    assert "\ndiverged at decode from recorded: the pixels differ" in output


def log_changed(folder: Path, **changes: Any) -> None:
    """The request "one" once more, changed before it was written, as "changed"."""
    (request,) = find_requests(folder, "one")
    writer = SegmentWriter(folder, 1 << 20, 1)
    writer.append(encode_line(replace(request, request_id="changed", **changes)))
    writer.close()


def test_replay_reports_divergence_from_the_recorded_answer(
    make_settings: MakeSettings, tmp_path: Path, replayed: Replayed
) -> None:
    serve(make_settings(request_log_directory=tmp_path / "log"), image())
    (request,) = find_requests(tmp_path / "log", "one")
    outputs = request.outputs["probabilities"] + np.array([2e-5, -2e-5, 0], np.float32)
    answer = request.answers[0] | {
        "probabilities": dict(
            zip(request.answers[0]["probabilities"], outputs[0].tolist(), strict=True)
        )
    }
    log_changed(
        tmp_path / "log", outputs=request.outputs | {"probabilities": outputs}, answers=[answer]
    )
    code, output, _ = replayed("changed")
    assert code == 1
    assert (
        "\ndiverged at recorded from onnxruntime/cpu/fp32: "
        "the largest difference of probabilities is 2e-05" in output
    )
    assert [name for name, verdict in verdicts(output).items() if verdict == "diverged"] == [
        "recorded"
    ]


def test_replay_reports_a_logged_answer_that_contradicts_the_logged_outputs(
    make_settings: MakeSettings, tmp_path: Path, replayed: Replayed
) -> None:
    serve(make_settings(request_log_directory=tmp_path / "log"), image())
    (request,) = find_requests(tmp_path / "log", "one")
    log_changed(
        tmp_path / "log",
        outputs=request.outputs | {"probabilities": request.outputs["probabilities"][:, ::-1]},
    )
    code, output, _ = replayed("changed")
    assert code == 1
    assert "\ndiverged at recorded: the logged answer differs from the logged outputs" in output


@contextmanager
def fake_service(card: dict[str, Any], answer: dict[str, Any], status: int = 200) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.say(200, card)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.say(status, answer)

        def say(self, code: int, content: dict[str, Any]) -> None:
            body = json.dumps(content).encode()
            self.send_response(code)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.process
def test_replay_names_a_running_service_that_answers_differently(
    make_settings: MakeSettings, tmp_path: Path, replayed: Replayed
) -> None:
    serve(make_settings(request_log_directory=tmp_path / "log"), image())
    (request,) = find_requests(tmp_path / "log", "one")
    card = {
        "model_version": request.model_version,
        "execution": {"actual": request.execution.model_dump()},
    }
    right = request.answers[0]
    moved = dict(zip(LABELS, LABELS[1:] + LABELS[:1], strict=True))  # every label another's
    wrong = right | {
        "label": moved[right["label"]],
        "probabilities": {moved[name]: share for name, share in right["probabilities"].items()},
        "prediction_set": [moved[name] for name in right["prediction_set"]],
    }
    with fake_service(card, right) as url:
        assert replayed("one", "--url", url)[0] == 0
    with fake_service(card, wrong) as url:
        code, output, _ = replayed("one", "--url", url)
    assert (code, verdicts(output)["recorded"], verdicts(output)["service"]) == (
        1,
        "equal",
        "diverged",
    )
    assert "\ndiverged at service from onnxruntime/cpu/fp32: " in output
    for answer, status, reason in (
        (right | {"label": "other"}, 200, "is not an answer of this bundle"),
        (right | {"prediction_set": []}, 200, "prediction_set is [], but"),
        (
            right | {"ood_score": right["ood_score"] + 0.1},
            200,
            "the largest difference of ood_score is 0.1",
        ),
        ({"error": {"code": "undecodable"}}, 422, "the service refused the request: 422"),
    ):
        with fake_service(card, answer, status) as url:
            code, output, _ = replayed("one", "--url", url)
        assert code == 1
        assert "\ndiverged at service" in output
        assert reason in output


@pytest.mark.process
def test_unreachable_service_gives_exit_code_2(
    make_settings: MakeSettings, tmp_path: Path, replayed: Replayed
) -> None:
    serve(make_settings(request_log_directory=tmp_path / "log"), image())
    with fake_service({"model_version": "0" * 12, "execution": {"actual": {}}}, {}) as url:
        gone = url
        code, _, error = replayed("one", "--url", url)
        assert (code, "does not describe its model" in error) == (2, True)
    execution = {
        "backend": "onnxruntime",
        "provider": "cpu",
        "precision": "fp32",
        "variant": "fp32",
    }
    with fake_service({"model_version": "0" * 12, "execution": {"actual": execution}}, {}) as url:
        code, _, error = replayed("one", "--url", url)
        assert (code, "runs model 000000000000, but" in error) == (2, True)
    code, _, error = replayed("one", "--url", gone)
    assert (code, "gave no answer" in error) == (2, True)


@pytest.mark.parametrize("request_id", ["unknown", "../../etc/passwd", "a b", "x" * 65, ""])
def test_unknown_request_id_gives_exit_code_2(
    make_settings: MakeSettings, tmp_path: Path, replayed: Replayed, request_id: str
) -> None:
    serve(make_settings(request_log_directory=tmp_path / "log"), image())
    code, output, error = replayed(request_id)
    assert (code, output) == (2, "")
    assert (
        "is not in log: it goes back to 20" if request_id == "unknown" else "is not a request id"
    ) in error


def test_missing_or_empty_request_log_is_explained(tmp_path: Path, replayed: Replayed) -> None:
    (tmp_path / "log").mkdir()
    assert "it holds no request" in replayed("one")[2]
    code, _, error = replayed("one", "--request-log", str(tmp_path / "nowhere"))
    assert (code, "nowhere is not a folder; set --request-log to" in error) == (2, True)


def test_unset_request_log_gives_exit_code_2(
    replayed: Replayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLIPWAY_REQUEST_LOG_DIRECTORY")
    code, _, error = replayed("one")
    assert (code, "set --request-log" in error) == (2, True)


def test_replay_takes_the_newest_request_of_an_id_and_lists_the_others(
    make_settings: MakeSettings, tmp_path: Path, replayed: Replayed
) -> None:
    serve(make_settings(request_log_directory=tmp_path / "log"), image(seed=1), image(seed=2))
    first, second = find_requests(tmp_path / "log", "one")
    code, output, error = replayed("one")
    assert code == 0
    assert "2 requests have this id, this is the newest" in error
    assert f"{second.time:%H:%M:%S.%f}" in output
    code, output, error = replayed("one", "--time", first.time.isoformat())
    assert (code, error) == (0, "")
    assert f"{first.time:%H:%M:%S.%f}" in output
    assert replayed("one", "--time", "2001-01-01")[0] == 2


def test_replay_finds_the_bundle_below_artifacts_or_names_it(
    certified: Path, make_settings: MakeSettings, tmp_path: Path, replayed: Replayed
) -> None:
    serve(make_settings(request_log_directory=tmp_path / "log"), image())
    version = load_bundle(certified / "bundle").version
    (certified / "reference_model").mkdir()
    for name in ("bundle", "certificate.json"):
        (certified / name).rename(certified / "reference_model" / name)
    certify(certified / "certificate.json", write_bundle(certified / "bundle", max_batch_size=8))
    for given in ([], ["--bundle", "artifacts/bundle"]):
        code, output, error = replayed("one", *given)
        assert code == 0
        assert f"found model {version} in artifacts/reference_model/bundle" in error
        assert "certified, gates passed, artifacts/reference_model/certificate.json" in output
    for name in ("bundle.json", "model_fp32.onnx"):  # the folder that `slipway release` makes
        (certified / "reference_model/bundle" / name).rename(certified / "reference_model" / name)
    code, output, error = replayed("one")
    assert code == 0
    assert f"found model {version} in artifacts/reference_model\n" in error
    assert "certified, gates passed, artifacts/reference_model/certificate.json" in output
    (certified / "reference_model/bundle.json").unlink()
    code, _, error = replayed("one")
    assert code == 2
    other = load_bundle(certified / "bundle").version
    assert f"model {version} is needed, but artifacts/bundle is model {other}" in error


def test_altered_bundle_is_refused(
    certified: Path, make_settings: MakeSettings, tmp_path: Path, replayed: Replayed
) -> None:
    serve(make_settings(request_log_directory=tmp_path / "log"), image())
    model = certified / "bundle/model_fp32.onnx"
    model.write_bytes(model.read_bytes()[:-1] + b"\0")
    code, output, error = replayed("one")
    assert (code, output) == (2, "")
    assert "model_fp32.onnx was altered" in error


def test_altered_request_is_refused(
    make_settings: MakeSettings, tmp_path: Path, replayed: Replayed
) -> None:
    serve(make_settings(request_log_directory=tmp_path / "log"), image())
    (segment,) = (tmp_path / "log").iterdir()
    segment.write_bytes(segment.read_bytes().replace(b'"payload":"iV', b'"payload":"iW'))
    code, _, error = replayed("one")
    assert (code, "was altered: the payload's SHA-256 does not match" in error) == (2, True)


LINEAGE = Lineage(
    git_revision="c0ffee" * 6,
    git_dirty=True,
    params={"seed": 7, "train": {"epochs": 3}},
    data=DataSource(path="data/own", hash="md5", digest="0123abcd.dir", bytes=1234567, files=64),
    digests={
        "artifacts/model/weights.safetensors": "11" * 32,
        "data/packed/manifest.json": "22" * 32,
        "dvc.lock#clean": "33" * 32,
    },
)


def test_lineage_shows_code_params_and_data_of_an_answer(
    certified: Path, make_settings: MakeSettings, tmp_path: Path, replayed: Replayed
) -> None:
    bundle = write_bundle(certified / "bundle", lineage=LINEAGE)
    certify(certified / "certificate.json", bundle)
    serve(make_settings(request_log_directory=tmp_path / "log"), image())
    code, output, _ = replayed("one", "--lineage")
    assert code == 0
    for fact in (
        f"model        {bundle.version} in artifacts/bundle",
        "certificate  certified, gates passed, artifacts/certificate.json",
        f"code         git {'c0ffee' * 6}, with uncommitted changes",
        "data         data/own, md5 0123abcd.dir, 64 files, 1,234,567 bytes",
        f"bundle       SHA-256 {bundle.digest}",
        f"packed data  SHA-256 {'22' * 32}",
        f"dvc.lock     clean  {'33' * 32}",
        'train  {"epochs": 3}',
    ):
        assert fact in output
    by_version = replayed(bundle.version, "--lineage")[1]
    assert by_version == output.partition("\n")[2]  # without the line about the request
    assert replayed("unknown", "--lineage")[0] == 2


def test_model_that_missed_its_gates_is_replayed_with_its_certificate(
    certified: Path, make_settings: MakeSettings, tmp_path: Path, replayed: Replayed
) -> None:
    serve(make_settings(request_log_directory=tmp_path / "log"), image())
    certify(certified / "certificate.json", load_bundle(certified / "bundle"), gates=[gate(0.5)])
    code, output, _ = replayed("one")
    assert code == 0
    assert "certified, gates missed, " in output


def test_missing_certificate_is_reported(
    certified: Path, make_settings: MakeSettings, tmp_path: Path, replayed: Replayed
) -> None:
    serve(make_settings(request_log_directory=tmp_path / "log"), image())
    (certified / "certificate.json").unlink()
    code, output, _ = replayed("one")
    assert code == 0
    assert "certificate  none that certifies it: " in output


@pytest.mark.process
def test_replay_runs_with_the_packages_of_a_bento(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    serve(make_settings(request_log_directory=tmp_path / "log"), image())
    script = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        absent = {"torch", "httpx", "onnx", "pyarrow", "yaml", "ruamel"}
        absent |= {"slipway.export", "slipway.data", "slipway.training"}
        if name.partition(".")[0] in absent or name in absent:
            raise ModuleNotFoundError(f"refused {name}", name=name)
sys.meta_path.insert(0, Refuse())
sys.argv = ["replay", "one", "--request-log", "log"]
from slipway.replay.__main__ import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch: torch is not installed" in done.stdout
