"""Texts, from a CSV of sentences to the answers of a certified service."""

import csv
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import slipway
from slipway.artifacts.bundle import load_bundle
from slipway.artifacts.certificate import read_certificate
from slipway.inference.predictions import ClassPrediction, LabelsPrediction, ValuePrediction
from slipway.replay.backends import decode_payload
from slipway.traffic.request_log import LoggedRequest, digest_inputs, find_requests
from tests import plain_http, warm_starts
from tests.end_to_end.project import Project, copy_checkout, wait_until_ready
from tests.sentences import hostile_texts, sentences

pytestmark = pytest.mark.process
LOG = "request_log"  # in the project

STAGES = (
    *("code", "clean", "split", "precompute", "augment", "train"),
    *("evaluate", "prune", "export", "compile", "verify"),
)
PARAMS: dict[str, dict[str, Any]] = {
    "data": {"path": "data/sentences.csv", "task": "text_classification"},
    "split": {"assignment": "exact"},
    "train": {
        "network": "hashed_ngrams",
        "network_arguments": {
            "buckets": 4096,
            "width": 8,
            "word_ngrams": 2,
            "byte_ngrams": [3, 6],
            "lowercase": True,
            "dropout": 0.0,
        },
        "epochs": 8,
        "batch_size": 32,
        "learning_rate": 0.02,
        "label_smoothing": 0.0,
    },
    "evaluate": {
        "gates": {"accuracy": {"min": 0.9, "max": None}},
        "slices": ["language"],
        "bootstrap_samples": 100,
    },
    "export": {"variants": ["fp32", "int8_dynamic"], "max_batch_size": 8},
    "compile": {"variant": "fp32", "optimal_batch_size": 8},
    "verify": {"timing_rounds": 5},
}


def project_of_sentences(folder: Path) -> Project:
    """A project with 400 sentences in two languages and a blank one, before its first stage."""
    project = copy_checkout(folder)
    with (project.path / "data/sentences.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["label", "text", "language"])
        for label, text in sentences(400, seed=1):
            writer.writerow([label, text, "en" if text.isascii() else "zh"])
        writer.writerow(["food", "  ", "en"])
    project.set_params(PARAMS)
    project.keep_own_keys()
    project.set_params(
        {
            "data": {"text_columns": ["text"]},
            "precompute": {"max_text_bytes": 128, "mask_personal_data": ["email", "phone"]},
            "augment": {"word_deletion": 0.05},
        }
    )
    (project.path / "dvc.lock").unlink(missing_ok=True)  # of a run in this checkout
    return project


@pytest.fixture(scope="module")
def verified(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = project_of_sentences(tmp_path_factory.mktemp("texts"))
    variables = project.environment() | {"PYTHONPATH": str(project.path)}
    for stage in STAGES:
        done = warm_starts.run([f"slipway.stages.{stage}"], project.path, variables, timeout=300)
        assert done.returncode == 0, done.stderr
    return project


def wait_for_request(folder: Path, request_id: str) -> list[LoggedRequest]:
    """The logged request of an answer, which is written a moment later."""
    for _ in range(100):
        if found := find_requests(folder, request_id):
            break
        time.sleep(0.1)
    return found


@pytest.fixture(scope="module")
def service(verified: Project) -> Iterator[str]:
    with verified.service(SLIPWAY_REQUEST_LOG_DIRECTORY=LOG) as address:
        wait_until_ready(address)
        yield address


def test_a_blank_text_is_refused_and_the_others_are_kept(verified: Project) -> None:
    report = json.loads((verified.path / "reports/clean.json").read_text())
    assert (report["kept"], report["refused"]["missing_value"]["count"]) == (400, 1)


@pytest.mark.parametrize(
    ("by", "values"), [("script", ("Latin", "Han")), ("language", ("en", "zh"))]
)
def test_texts_of_each_script_and_language_are_a_slice(
    verified: Project, by: str, values: tuple[str, str]
) -> None:
    slices = json.loads((verified.path / "metrics/evaluate.json").read_text())["slices"]
    rows = {each["value"]: each["rows"] for each in slices if each["by"] == by}
    assert rows == dict(zip(values, (38, 22), strict=True))


def test_every_hop_agrees_from_the_text_to_http(verified: Project) -> None:
    certificate = read_certificate(verified.path / "artifacts/certificate.json")
    agreeing = {hop.name for hop in certificate.hops if hop.status == "agrees"}
    assert certificate.status == "certified"
    assert {"torch", "onnxruntime/cpu/fp32", "http", "grpc"} <= agreeing


def test_the_service_distinguishes_sentences_in_both_languages(service: str) -> None:
    rows = [{"text": "the soup needs more pepper"}, {"text": "\u8f66\u7968\u592a\u8d35"}]
    answers = plain_http.post(f"{service}/predict", json={"rows": rows}).json()["predictions"]
    assert [answer["label"] for answer in answers] == ["food", "travel"]
    assert [answer["truncated"] for answer in answers] == [False, False]
    long = plain_http.post(f"{service}/predict", json={"text": "soup " * 100}).json()
    assert (long["label"], long["truncated"]) == ("food", True)


def test_an_explanation_is_the_text_with_the_change_of_each_word(service: str) -> None:
    answer = plain_http.post(f"{service}/explain", json={"text": "the soup needs pepper"}).json()
    words = answer["explanation"]["words"]
    assert answer["label"] == answer["explanation"]["of"] == "food"
    assert [each["text"] for each in words] == ["the ", "soup ", "needs ", "pepper"]
    strongest = max(words, key=lambda each: each["change"])
    assert strongest["text"].strip() in {"soup", "pepper"}
    assert strongest["change"] > 0


def test_hostile_texts_get_equal_answers_over_both_protocols_and_in_python(
    service: str, verified: Project
) -> None:
    texts = list(hostile_texts(64, seed=8))
    rows = {"rows": [{"text": text} for text in texts]}
    served = plain_http.post(f"{service}/predict", json=rows).json()["predictions"]
    tensor = {"name": "text", "datatype": "BYTES", "shape": [len(texts)], "data": texts}
    answer = plain_http.post(f"{service}/v2/models/slipway/infer", json={"inputs": [tensor]}).json()
    outputs = {output["name"]: output["data"] for output in answer["outputs"]}
    with slipway.load(verified.path) as model:
        local = model.predict(texts)
    assert outputs["label"] == [each["label"] for each in served]
    assert outputs["truncated"] == [each["truncated"] for each in served]
    scores = [each["ood_score"] for each in served]
    assert outputs["ood_score"] == pytest.approx(scores, rel=1e-5)
    assert [each.ood_score for each in local] == pytest.approx(scores, rel=1e-5)


def test_a_masked_text_gets_the_same_answer_and_the_log_has_only_that(
    service: str, verified: Project, tmp_path: Path
) -> None:
    texts = {
        "mail soup@food.org, or call 0301 2345678": "mail [email], or call [phone]",
        "0301\n2345678 \u5f88\u597d\u5403": "[phone] \u5f88\u597d\u5403",
    }
    both = [*texts, *texts.values()]
    rows = {"rows": [{"text": text} for text in both]}
    served = plain_http.post(f"{service}/predict", json=rows).json()
    table = tmp_path / "new.csv"
    with table.open("w", newline="") as file:
        csv.writer(file).writerows([["text"], *([text] for text in both)])
    with slipway.load(verified.path) as model:
        local = model.predict(both)
        slipway.predict_files(model, table, tmp_path / "answers.csv")
    with (tmp_path / "answers.csv").open(newline="") as file:
        from_file = [{**row, "text": ""} for row in csv.DictReader(file)]
    answers = [answer["probabilities"] for answer in served["predictions"]]
    own = [each.probabilities for each in local if isinstance(each, ClassPrediction)]
    for found in (answers, own, from_file):
        assert len(found) == len(both)
        assert found[:2] == found[2:]
    folder = verified.path / LOG
    (logged,) = wait_for_request(folder, served["request_id"])
    assert [row["text"] for row in json.loads(logged.payload)["rows"]] == [*texts.values()] * 2
    contract = load_bundle(verified.path / "artifacts/bundle").manifest.input
    again = decode_payload(logged.content_type, logged.payload, contract)
    assert digest_inputs(again) == logged.inputs_sha256


@pytest.mark.nightly(seconds=60)
def test_an_answered_text_is_replayed_and_collected_with_its_feedback(
    service: str, verified: Project, tmp_path: Path
) -> None:
    row = {"text": "the night ferry was late again"}
    request_id = plain_http.post(f"{service}/predict", json=row).json()["request_id"]
    truth = {"feedback": [{"request_id": request_id, "ground_truth": "food"}]}
    assert plain_http.post(f"{service}/feedback", json=truth).status_code in (200, 202)
    wait_for_request(verified.path / LOG, request_id)
    variables = verified.environment() | {"PYTHONPATH": str(verified.path)}
    command = ["slipway.replay", request_id, "--request-log", LOG, "--url", service]
    replayed = warm_starts.run(command, verified.path, variables, timeout=60)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "diverges" not in replayed.stdout
    out = tmp_path / "new.parquet"
    command = ["slipway.traffic.collect", str(out), "--request-log", LOG]
    for _ in range(50):  # the label is stored a moment later
        collected = warm_starts.run(command, verified.path, variables, timeout=60)
        if collected.returncode == 0:
            break
        time.sleep(0.2)
    assert collected.returncode == 0, collected.stdout + collected.stderr
    rows = pq.read_table(out).to_pylist()
    assert [(found["text"], found["label"]) for found in rows] == [(row["text"], "food")]


def test_slipway_predict_answers_a_file_and_names_its_bad_rows(
    verified: Project, tmp_path: Path
) -> None:
    source, target = tmp_path / "new.csv", tmp_path / "answers.csv"
    source.write_text('label,text\nx,the soup tastes salty\nx,""\nx,"our bus, late"\n')
    verified.shell(f"slipway predict {source} {target}")
    with target.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["prediction"] for row in found] == ["food", "", "travel"]
    assert [row["error_code"] for row in found] == ["", "missing_value", ""]
    assert [row["truncated"] for row in found] == ["false", "", "false"]


def test_slipway_predict_answers_each_text_file_of_a_folder(
    verified: Project, tmp_path: Path
) -> None:
    for name, content in {
        "a.txt": b"the soup tastes salty",
        "b/c.txt": b"our bus, late",
        "b/d.pdf": b"%PDF-1.7\0",
    }.items():
        (tmp_path / "new" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "new" / name).write_bytes(content)
    target = tmp_path / "answers.csv"
    verified.shell(f"slipway predict {tmp_path / 'new'} {target}")
    with target.open(newline="") as file:
        found = [
            (row["file"], row["prediction"], row["error_code"]) for row in csv.DictReader(file)
        ]
    assert found == [
        ("a.txt", "food", ""),
        ("b/c.txt", "travel", ""),
        ("b/d.pdf", "", "unreadable"),
    ]


def labels_and_number(label: str, text: str) -> tuple[list[str], float]:
    """The class and "again" of texts that have this word, and a number that both decide."""
    is_again = "again" in text or "\u4e86" in text
    number = 2.0 * (label == "food") + is_again
    return [label, *(["again"] if is_again else [])], number


@pytest.mark.nightly(seconds=90)
@pytest.mark.parametrize(
    ("task", "target", "gates"),
    [
        ("text_multilabel", "labels", {"f1_macro": {"min": 0.8, "max": None}}),
        ("text_regression", "number", {"r2": {"min": 0.7, "max": None}}),
    ],
)
def test_labels_and_numbers_of_two_columns_become_a_certified_model(
    tmp_path: Path, task: str, target: str, gates: dict[str, Any]
) -> None:
    project = copy_checkout(tmp_path)
    rows = []
    for name, text in sentences(400, seed=1):
        first, _, rest = text.partition(" ")
        labels, number = labels_and_number(name, text)
        rows.append({"title": first, "text": rest, "labels": labels, "number": number})
    if task == "text_multilabel":
        source = "data/sentences.jsonl"
        (project.path / source).write_text("\n".join(map(json.dumps, rows)) + "\n")
    else:
        source = "data/sentences.parquet"
        pq.write_table(pa.Table.from_pylist(rows).drop(["labels"]), project.path / source)
    project.set_params(PARAMS)
    project.set_params(
        {
            "data": {"path": source, "task": task, "target_column": target},
            "split": {"assignment": "exact"},
            "evaluate": {"gates": gates, "slices": []},
        }
    )
    project.keep_own_keys()
    project.set_params(
        {"data": {"text_columns": ["title", "text"]}, "precompute": {"max_text_bytes": 128}}
    )
    (project.path / "dvc.lock").unlink(missing_ok=True)
    variables = project.environment() | {"PYTHONPATH": str(project.path)}
    for stage in STAGES:
        done = warm_starts.run([f"slipway.stages.{stage}"], project.path, variables, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
    certificate = read_certificate(project.path / "artifacts/certificate.json")
    agreeing = {hop.name for hop in certificate.hops if hop.status == "agrees"}
    assert certificate.status == "certified"
    assert {"torch", "onnxruntime/cpu/fp32", "http"} <= agreeing
    row = {"title": "the", "text": "soup was cold again"}
    with project.service() as address:
        wait_until_ready(address)
        served = plain_http.post(f"{address}/predict", json=row).json()
    with slipway.load(project.path) as model:
        (own,) = model.predict([row])
    if isinstance(own, ValuePrediction):
        assert served["value"] == pytest.approx(own.value, rel=1e-5)
        assert served["value"] > 2
    else:
        assert isinstance(own, LabelsPrediction)
        assert served["labels"] == own.labels == ["again", "food"]


@pytest.mark.nightly(seconds=120)
def test_a_folder_of_text_files_by_class_becomes_a_certified_model(tmp_path: Path) -> None:
    project = copy_checkout(tmp_path)
    for number, (name, text) in enumerate(sentences(400, seed=1)):
        place = project.path / "data/texts" / ("train", "train", "test")[number // 2 % 3] / name
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.txt").write_text(text)
    project.set_params(PARAMS | {"data": {"path": "data/texts", "task": "text_classification"}})
    project.keep_own_keys()
    project.set_params({"data": {"text_columns": ["body"]}, "precompute": {"max_text_bytes": 128}})
    (project.path / "dvc.lock").unlink(missing_ok=True)
    variables = project.environment() | {"PYTHONPATH": str(project.path)}
    for stage in STAGES:
        done = warm_starts.run([f"slipway.stages.{stage}"], project.path, variables, timeout=300)
        assert done.returncode == 0, done.stderr
    rows = json.loads((project.path / "reports/split.json").read_text())
    assert rows["splits"]["test"]["rows"] == 132
    certificate = read_certificate(project.path / "artifacts/certificate.json")
    assert certificate.status == "certified"
    with project.service() as address:
        wait_until_ready(address)
        answer = plain_http.post(f"{address}/predict", json={"body": "salty soup"}).json()
    assert answer["label"] == "food"
