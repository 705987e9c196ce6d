"""The folder that `slipway export browser` writes, without a browser."""

import base64
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipway.artifacts.certificate import Hop, read_certificate
from slipway.artifacts.uncertainty import Answers
from slipway.export.certification.comparison import not_executed
from slipway.export.targets.browser import hop as browser_hop
from slipway.export.targets.browser.export import (
    SHA256,
    VERSION,
    WEBGPU_SHA256,
    RunHop,
    export_browser,
    read_runtime,
    require_page,
    write_browser,
)
from slipway.export.targets.exported import ExportSource, TargetAnswers, compare, summary
from slipway.inputs.images import TransformContract
from slipway.system import files
from slipway.system.errors import ParityError, UnavailableError
from tests.encoder_folders import word_piece
from tests.export.targets.browser.runtimes import CODE, write_stand_in
from tests.export.targets.sources import image_source, photos, table_source, text_source
from tests.serving.bundles import CONTRACT, text_classifier, write_bundle
from tests.tokens import bpe, token_contract

LATER = ("certificate.json", "certificate.js", "export.json")  # written after the measured files


def answering(shift: float = 0.0, webgpu: Hop | None = None) -> RunHop:
    """Return a fake hop that predicts as the graph does, plus `shift` for the first row."""

    def run(_: Path, source: ExportSource, __: bool) -> tuple[list[Hop], dict[str, Any]]:
        found = source.reference(np.asarray(source.rows.comparison.rows.inputs))
        outputs = found.outputs.copy()
        outputs[0] += np.float32(shift)
        answers = TargetAnswers(Answers(outputs, found.scores), 1.5, 100.0)
        hop = compare(source, "browser", source.requested("browser", "wasm"), answers)
        return [hop, *([webgpu] if webgpu else [])], {}

    return run


def not_run(_: Path, source: ExportSource, __: bool) -> tuple[list[Hop], dict[str, Any]]:
    return [not_executed("browser", source.requested("browser", "wasm"), "no browser here")], {}


def terms_of_webgpu(folder: Path) -> dict[str, Any]:
    """Read from certificate.js if the page offers WebGPU, and what it compares before."""
    text = (folder / "certificate.js").read_text()
    content = json.loads(text.removeprefix("slipway.certificate = ").rstrip(";\n"))
    return dict(content["webgpu"])


def test_the_folder_has_contract_certificate_model_and_a_record_of_every_file(
    tmp_path: Path,
) -> None:
    source, out = image_source(tmp_path, photos()), tmp_path / "page"
    runtime = read_runtime(write_stand_in(tmp_path / "runtime"))
    record = write_browser(out, source, runtime, answering())
    assert record.certified
    assert files.sha256_file(out / "bundle.json") == source.bundle.digest == record.bundle_digest
    names = {path.name for path in out.iterdir()}
    assert names == {*record.files, "export.json"}
    assert all(files.sha256_file(out / name) == digest for name, digest in record.files.items())
    certificate = read_certificate(out / "certificate.json")
    assert [hop.name for hop in certificate.hops] == ["onnxruntime/cpu/fp32", "browser"]
    content = (out / "model.js").read_text().removeprefix("slipway.model = ").rstrip(";\n")
    model = json.loads(content)
    assert base64.b64decode(model["onnx"]) == source.graph()
    assert model["labels"] == source.bundle.manifest.output.labels
    assert "hop browser agrees: 12 rows" in summary(out, record)
    recorded = json.loads((out / "export.json").read_text())["facts"]
    written = sum(path.stat().st_size for path in out.iterdir()) / 1e6
    later = sum((out / name).stat().st_size for name in LATER) / 1e6
    assert recorded["folder_mb"] == pytest.approx(written - later)
    assert recorded["latency_ms"] == 1.5


def test_failed_browser_hop_is_named_and_leaves_the_earlier_export_unchanged(
    tmp_path: Path,
) -> None:
    source, out = image_source(tmp_path, photos()), tmp_path / "page"
    runtime = read_runtime(write_stand_in(tmp_path / "runtime"))
    write_browser(out, source, runtime, answering())
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(ParityError, match=r"hop browser differs: .*difference is 0\.01"):
        write_browser(out, source, runtime, answering(0.01))
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir() if "page" in path.name] == ["page"]


def test_browser_export_without_a_run_hop_is_not_certified(tmp_path: Path) -> None:
    runtime = read_runtime(write_stand_in(tmp_path / "runtime"))
    source, out = image_source(tmp_path, photos()), tmp_path / "page"
    record = write_browser(out, source, runtime, not_run)
    assert not record.certified
    assert "NOT certified: hop browser was not run: no browser here" in summary(out, record)
    assert "NOT certified in a browser" in (out / "certificate.js").read_text()


def test_browser_hop_without_chromium_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    [hop], _ = browser_hop.run_browser_hop(tmp_path, image_source(tmp_path, photos()))
    assert hop.status == "not_executed"
    assert "there is no Chromium here, expected one of chromium" in hop.reason
    assert "apt-get install chromium" in hop.reason


@pytest.mark.parametrize("is_file", [False, True])
def test_export_never_replaces_a_folder_that_is_not_an_export(
    is_file: bool, tmp_path: Path
) -> None:
    out = tmp_path / "mine"
    if is_file:
        out.write_text("mine")
    else:
        out.mkdir()
        (out / "letter.txt").write_text("mine")
    runtime = read_runtime(write_stand_in(tmp_path / "runtime"))
    with pytest.raises(UnavailableError, match=r"is no export, expected a new folder.*--out"):
        write_browser(out, image_source(tmp_path, photos()), runtime, answering())
    assert (out if is_file else out / "letter.txt").read_text() == "mine"


def test_web_runtime_is_rewritten_as_a_classic_script(tmp_path: Path) -> None:
    runtime = read_runtime(write_stand_in(tmp_path / "runtime"))
    assert runtime.version == "9.9.9"
    assert not runtime.is_tried
    assert "import.meta" not in runtime.script
    assert "globalThis.ort = { InferenceSession: a, Tensor: b, env: c };" in runtime.script
    assert "export" not in runtime.script
    assert "sourceMappingURL" not in runtime.script


def test_the_runtime_is_read_from_an_npm_archive(tmp_path: Path) -> None:
    write_stand_in(tmp_path / "package")
    with tarfile.open(tmp_path / "runtime.tgz", "w:gz") as archive:
        archive.add(tmp_path / "package", "package")
    assert read_runtime(tmp_path / "runtime.tgz") == read_runtime(tmp_path)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda folder: folder.mkdir(), "has no ort.wasm.bundle.min.mjs and no ort-wasm"),
        (lambda folder: folder.write_bytes(b"no archive"), "is no npm archive"),
        (lambda folder: write_stand_in(folder, "alert(1)"), "is not onnxruntime-web's code"),
        (
            lambda folder: write_stand_in(folder, CODE.replace("9.9.9", VERSION)),
            "were altered",
        ),
    ],
)
def test_error_for_a_wrong_runtime_says_where_to_get_it(
    make: Callable[[Path], object], found: str, tmp_path: Path
) -> None:
    make(tmp_path / "runtime")
    with pytest.raises(UnavailableError, match=found) as error:
        read_runtime(tmp_path / "runtime")
    assert f"expected onnxruntime-web, tried with {VERSION}" in str(error.value)
    assert "SHA-256 11e64bd8" in str(error.value)
    assert f"npm pack onnxruntime-web@{VERSION}" in str(error.value)


def test_error_without_a_runtime_comes_before_the_project_is_read(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="no --runtime was given; expected onnxruntime-web"):
        export_browser(tmp_path / "out", None, None, download=False)


def test_error_names_the_part_of_the_bundle_that_the_page_cannot_run(tmp_path: Path) -> None:
    transform = TransformContract(function="transforms:own", sha256="0" * 64)
    own = CONTRACT.model_copy(update={"transform": transform})
    with pytest.raises(UnavailableError, match=r"cannot carry the function transforms:own of"):
        require_page(image_source(tmp_path / "own", photos(), input=own))
    source = image_source(tmp_path / "images", photos())
    for number, (content, found) in enumerate(
        [
            (bpe().replace('"use_regex":true', '"use_regex":false'), "a ByteLevel pre-tokenizer"),
            (bpe().replace('"normalizer":null', '"normalizer":{"type":"NFC"}'), "the normalizer N"),
            (bpe().replace('"type":"BPE"', '"type":"Unigram"'), "a model of the type Unigram"),
        ]
    ):
        contract = token_contract(tokenizer=content)
        texts = write_bundle(tmp_path / str(number), text_classifier(), input=contract)
        with pytest.raises(UnavailableError, match=f"cannot carry this tokenizer, for {found}"):
            require_page(ExportSource(texts, source.certificate, "fp32", source.rows))
    require_page(text_source(tmp_path / "texts"))
    require_page(text_source(tmp_path / "tokens", input=token_contract()))
    require_page(text_source(tmp_path / "words", input=token_contract(tokenizer=word_piece())))
    require_page(source)
    require_page(table_source(tmp_path / "table"))


def judged(
    source: ExportSource,
    change: Callable[[dict[int, bytes]], None],
    webgpu: dict[str, Any] | None = None,
    shift: float = 0.0,
) -> tuple[list[Hop], dict[str, Any]]:
    """Judge the messages of a page: the right predictions after `change`.

    With an adapter in `webgpu`, WebGPU's first output of each row is off by `shift`.
    """
    rows = np.asarray(source.rows.comparison.rows.inputs)
    outputs, scores = source.reference(rows)
    talk = browser_hop.Conversation(list(source.rows.payloads()), rounds=1)
    for row, values in enumerate(rows):
        numbers = np.append(outputs[row], scores[row]).astype("<f4")
        by_webgpu = numbers + np.eye(1, len(numbers), dtype="<f4")[0] * np.float32(shift)
        both = [numbers, by_webgpu] if webgpu and "adapter" in webgpu else [numbers]
        talk.answers[row] = np.concatenate(both).tobytes() + values.tobytes()
    change(talk.answers)
    done = {"agent": "test", "latency_ms": 1.0, "rows_per_second": 9.0, "webgpu": webgpu}
    return browser_hop.judge(source, talk, done)


def test_browser_hop_agrees_if_inputs_and_predictions_are_equal(tmp_path: Path) -> None:
    [hop], facts = judged(image_source(tmp_path, photos()), lambda _: None)
    assert hop.status == "agrees"
    assert facts["rows_with_equal_inputs"] == 12
    assert facts["webgpu"] == "not executed: exported without --webgpu"


ADAPTER = {"adapter": "acme gpu", "latency_ms": 2.5, "rows_per_second": 7.0}


def test_predictions_by_webgpu_are_a_hop_of_their_own_with_its_speed(tmp_path: Path) -> None:
    source = image_source(tmp_path, photos())
    (hop, webgpu), facts = judged(source, lambda _: None, ADAPTER, shift=4e-6)
    assert (hop.status, webgpu.status) == ("agrees", "agrees")
    assert (hop.name, webgpu.name) == ("browser", "browser/webgpu")
    assert (hop.latency_ms, webgpu.latency_ms) == (1.0, 2.5)
    assert webgpu.requested.provider == "webgpu"
    assert hop.max_difference == 0
    assert webgpu.max_difference == pytest.approx(4e-6, rel=0.1)
    assert facts["webgpu"] == ADAPTER


def test_webgpu_hop_differs_beyond_the_tolerance_of_fp32(tmp_path: Path) -> None:
    source = image_source(tmp_path, photos())
    (hop, webgpu), _ = judged(source, lambda _: None, ADAPTER, shift=4e-5)
    assert (hop.status, webgpu.status) == ("agrees", "differs")
    assert "expected at most 1e-05 (verify.max_difference)" in webgpu.reason


def test_webgpu_without_an_adapter_is_recorded_with_the_reason(tmp_path: Path) -> None:
    absent = {"reason": "this browser has no WebGPU adapter"}
    (hop, webgpu), facts = judged(image_source(tmp_path, photos()), lambda _: None, absent)
    assert (hop.status, webgpu.status) == ("agrees", "not_executed")
    assert webgpu.reason == absent["reason"]
    assert facts["webgpu"] == absent


def test_page_offers_webgpu_only_if_its_hop_agrees(tmp_path: Path) -> None:
    source = image_source(tmp_path, photos())
    runtime = read_runtime(write_stand_in(tmp_path / "runtime"), has_webgpu=True)
    (_, agreed), _ = judged(source, lambda _: None, ADAPTER)
    record = write_browser(tmp_path / "yes", source, runtime, answering(webgpu=agreed))
    assert record.more_hops == (agreed,)
    certificate = read_certificate(tmp_path / "yes/certificate.json")
    assert [hop.name for hop in certificate.hops[-2:]] == ["browser", "browser/webgpu"]
    terms = terms_of_webgpu(tmp_path / "yes")
    assert (terms["reason"], terms["max_difference"], len(terms["rows"])) == ("", 1e-5, 4)
    assert "hop browser/webgpu agrees: 12 rows" in summary(tmp_path / "yes", record)

    requested = source.requested("browser", "webgpu")
    absent = not_executed("browser/webgpu", requested, "no adapter here")
    record = write_browser(tmp_path / "no", source, runtime, answering(webgpu=absent))
    assert record.certified
    assert terms_of_webgpu(tmp_path / "no")["reason"] == "its hop was not run: no adapter here"
    assert "NOT certified: hop browser/webgpu was not run" in summary(tmp_path / "no", record)

    record = write_browser(tmp_path / "without", source, runtime, not_run)
    assert not record.certified
    assert terms_of_webgpu(tmp_path / "without")["reason"].endswith("no browser here")


def test_export_is_refused_if_webgpu_differs_and_names_its_hop(tmp_path: Path) -> None:
    source, out = image_source(tmp_path, photos()), tmp_path / "page"
    runtime = read_runtime(write_stand_in(tmp_path / "runtime"), has_webgpu=True)
    (_, differs), _ = judged(source, lambda _: None, ADAPTER, shift=0.01)
    with pytest.raises(ParityError, match=r"hop browser/webgpu differs: .*Export without --webgpu"):
        write_browser(out, source, runtime, answering(webgpu=differs))
    assert not out.exists()


def test_runtime_with_webgpu_is_read_from_its_own_files(tmp_path: Path) -> None:
    folder = write_stand_in(tmp_path / "runtime")
    assert read_runtime(folder).digests.keys() == SHA256.keys()
    assert read_runtime(folder, has_webgpu=True).digests.keys() == WEBGPU_SHA256.keys()
    for name in WEBGPU_SHA256:
        (folder / "dist" / name).unlink()
    with pytest.raises(UnavailableError, match=r"has no ort\.webgpu\.bundle\.min\.mjs"):
        read_runtime(folder, has_webgpu=True)


def test_browser_hop_differs_if_one_png_pixel_is_one_level_off(tmp_path: Path) -> None:
    def change(answers: dict[int, bytes]) -> None:
        last = answers[3][-1]
        answers[3] = answers[3][:-1] + bytes([last - 1 if last else 1])

    [hop], _ = judged(image_source(tmp_path, photos()), change)
    assert hop.status == "differs"
    assert "preprocessing: 1 of 12 rows became other inputs, by up to 1 in row3" in hop.reason


@pytest.mark.parametrize("length", [0, 17])
def test_browser_hop_refuses_missing_and_incomplete_predictions(
    length: int, tmp_path: Path
) -> None:
    def change(answers: dict[int, bytes]) -> None:
        if length:
            answers[2] = answers[2][:length]
        else:
            del answers[2]

    [hop], _ = judged(image_source(tmp_path, photos()), change)
    assert hop.status == "differs"
    assert "of 12 rows were answered" in hop.reason
