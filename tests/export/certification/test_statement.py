"""The in-toto statement of a release, checked by an independent reader."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slipway.artifacts.bundle import load_bundle
from slipway.artifacts.certificate import read_certificate
from slipway.export.certification.statement import STATEMENT, statement_of
from slipway.export.release import RELEASED, release
from slipway.system import files
from tests.serving.bundles import certify, gate, hop, write_bundle

# Run in an environment that has the package in-toto-attestation and nothing else.
READER = """
import sys
from google.protobuf import json_format
from in_toto_attestation.predicates.test_result.v0.test_result_pb2 import TestResult
from in_toto_attestation.v1.statement import Statement
from in_toto_attestation.v1.statement_pb2 import Statement as Message
statement = Statement.copy_from_pb(json_format.Parse(open(sys.argv[1]).read(), Message()))
statement.validate()
predicate = json_format.ParseDict(json_format.MessageToDict(statement.pb.predicate), TestResult())
print(len(statement.pb.subject), predicate.result, len(predicate.passed_tests))
"""


@pytest.fixture(name="released")
def _released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a release in the current folder, with one gate and one hop that was not executed."""
    monkeypatch.chdir(tmp_path)
    bundle = write_bundle(tmp_path / "artifacts/bundle")
    hops = [hop(), hop("cuda", status="not_executed")]
    certify(tmp_path / "artifacts/certificate.json", bundle, hops)
    release()
    return tmp_path / RELEASED


def test_in_toto_statement_lists_every_file_gate_and_hop(released: Path) -> None:
    statement = json.loads((released / STATEMENT).read_bytes())
    subject = {each["name"]: each["digest"]["sha256"] for each in statement["subject"]}
    assert subject == {
        name: files.sha256_file(released / name) for name in ("bundle.json", "model_fp32.onnx")
    }
    predicate = statement["predicate"]
    assert (predicate["result"], predicate["failedTests"]) == ("PASSED", [])
    assert predicate["passedTests"] == ["gate accuracy", f"hop {hop().name}"]
    certificate, _, threshold = predicate["configuration"]
    assert certificate["digest"]["sha256"] == files.sha256_file(released / "certificate.json")
    assert threshold["name"] == "evaluate.gates.accuracy"
    assert (threshold["annotations"]["min"], threshold["annotations"]["max"]) == (0.8, None)
    assert threshold["annotations"]["measured"]["value"] == 0.9
    assert threshold["annotations"]["measured"]["rows"] > 0


@pytest.mark.parametrize(("value", "result"), [(0.9, "PASSED"), (0.7, "FAILED"), (None, "WARNED")])
def test_result_of_the_in_toto_statement_is_the_verdict_of_the_gates(
    tmp_path: Path, value: float | None, result: str
) -> None:
    bundle = write_bundle(tmp_path / "bundle")
    path = certify(tmp_path / "certificate.json", bundle, gates=[gate(value)])
    statement = statement_of(load_bundle(bundle.root), read_certificate(path), "00" * 32)
    assert statement["predicate"]["result"] == result


@pytest.mark.nightly(seconds=20)
def test_reference_reader_of_in_toto_accepts_the_statement(released: Path, tmp_path: Path) -> None:
    uv, python = str(Path(sys.executable).with_name("uv")), str(tmp_path / "reader/bin/python")
    subprocess.run([uv, "venv", "--quiet", str(tmp_path / "reader")], check=True, timeout=60)
    install = [uv, "pip", "install", "--quiet", "--python", python, "in-toto-attestation==0.9.3"]
    installed = subprocess.run(install, capture_output=True, text=True, timeout=120)
    if installed.returncode:
        pytest.skip(f"in-toto-attestation cannot be installed: {installed.stderr[-300:]}")
    command = [python, "-c", READER, str(released / STATEMENT)]
    read = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert read.stdout == "2 PASSED 2\n", read.stderr
