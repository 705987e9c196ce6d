"""The bill of materials of a release, checked by an independent CycloneDX validator."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from slipway.artifacts.bundle import DataSource, Lineage
from slipway.artifacts.certificate import read_certificate
from slipway.export.certification.bill_of_materials import BILL, DATA, as_spdx, bill_of_materials
from slipway.export.release import RELEASED, release
from slipway.system import files
from tests.serving.bundles import certify, write_bundle

# Run in an environment that has cyclonedx-python-lib and nothing else.
VALIDATOR = """
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
text = open(sys.argv[1]).read()
print(JsonStrictValidator(SchemaVersion.V1_6).validate_str(text))
print(JsonStrictValidator(SchemaVersion.V1_6).validate_str(text.replace("SHA-256", "SHA-255", 1)))
"""
DIGEST = "9e" * 16


def write_release(folder: Path, **export: str | None) -> tuple[dict[str, Any], str]:
    """Release a tiny model with these `export` params. Returns its bill and the terminal line."""
    lineage = Lineage(
        git_revision=None,
        git_dirty=False,
        params={
            "data": {"path": "data/fruit.csv"},
            "train": {"network": "timm/resnet18", "pretrained": "hub"},
            "export": {"purpose": "Sorts fruit.", "license": None, "data_license": None} | export,
        },
        data=DataSource(path="data/fruit.csv", hash="md5", digest=DIGEST, bytes=9, files=None),
        digests={},
    )
    bundle = write_bundle(folder / "artifacts/bundle", lineage=lineage)
    certify(folder / "artifacts/certificate.json", bundle)
    line = release()
    return json.loads((folder / RELEASED / BILL).read_bytes()), line


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def component(bill: dict[str, Any], reference: str) -> dict[str, Any]:
    (found,) = [one for one in bill["components"] if one["bom-ref"].startswith(reference)]
    assert isinstance(found, dict)
    return found


def test_bill_of_materials_lists_model_graphs_data_packages_and_licences(
    tmp_path: Path,
) -> None:
    bill, line = write_release(tmp_path, license="apache-2.0", data_license="Ours, on request")
    model = bill["metadata"]["component"]
    assert model["type"] == "machine-learning-model"
    assert model["licenses"] == [{"expression": "Apache-2.0"}]
    assert model["pedigree"]["ancestors"][0]["name"] == "timm/resnet18"
    card = model["modelCard"]
    assert card["considerations"]["useCases"] == ["Sorts fruit."]
    (metric,) = card["quantitativeAnalysis"]["performanceMetrics"]
    assert (metric["type"], metric["value"]) == ("accuracy", "0.9")
    assert card["modelParameters"]["datasets"] == [{"ref": DATA}]
    data = component(bill, DATA)
    assert data["hashes"] == [{"alg": "MD5", "content": DIGEST}]
    assert data["licenses"] == [{"license": {"name": "Ours, on request"}}]
    graph = component(bill, "model_fp32.onnx")
    digest = files.sha256_file(tmp_path / RELEASED / "model_fp32.onnx")
    assert graph["hashes"] == [{"alg": "SHA-256", "content": digest}]
    package = component(bill, "pkg:pypi/onnx@")
    assert package["purl"] == f"pkg:pypi/onnx@{version('onnx')}"
    assert package["licenses"] == [{"expression": "Apache-2.0"}]
    assert component(bill, "pkg:pypi/numpy@")["version"] == version("numpy")  # onnx requires it
    assert "licences" not in line


def test_bill_of_materials_states_which_licences_are_undeclared(tmp_path: Path) -> None:
    bill, line = write_release(tmp_path)
    assert line.endswith("lacks licences: set export.license and export.data_license")
    for found in (bill["metadata"]["component"], component(bill, DATA)):
        assert "licenses" not in found
        assert found["properties"][0]["value"].startswith("NOASSERTION: set export.")


def test_bill_of_materials_omits_the_licence_of_a_package_in_another_version(
    tmp_path: Path,
) -> None:
    bundle = write_bundle(tmp_path / "bundle", versions={"onnx": "0.1", "gone": "2+cpu"})
    path = certify(tmp_path / "certificate.json", bundle)
    bill = bill_of_materials(bundle, read_certificate(path), "00" * 32, "11" * 32)
    packages = [one for one in bill["components"] if one["type"] == "library"]
    assert [one["purl"] for one in packages] == ["pkg:pypi/gone@2%2Bcpu", "pkg:pypi/onnx@0.1"]
    assert not any("licenses" in one for one in packages)


def test_equal_releases_have_equal_bills_of_materials(tmp_path: Path) -> None:
    assert write_release(tmp_path)[0] == write_release(tmp_path)[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("mit", "MIT"), ("mit or apache-2.0", "MIT OR Apache-2.0"), ("BSD", None), ("", None)],
)
def test_as_spdx_returns_only_valid_spdx_expressions(text: str, expected: str | None) -> None:
    assert as_spdx(text) == expected


@pytest.mark.nightly(seconds=30)
def test_cyclonedx_validator_accepts_the_bill_of_materials_and_refuses_a_wrong_one(
    tmp_path: Path,
) -> None:
    write_release(tmp_path, license="Apache-2.0", data_license="Ours, on request")
    uv, python = str(Path(sys.executable).with_name("uv")), str(tmp_path / "validator/bin/python")
    subprocess.run([uv, "venv", "--quiet", str(tmp_path / "validator")], check=True, timeout=60)
    package = "cyclonedx-python-lib[json-validation]==11.12.0"
    install = [uv, "pip", "install", "--quiet", "--python", python, package]
    installed = subprocess.run(install, capture_output=True, text=True, timeout=120)
    if installed.returncode:
        pytest.skip(f"cyclonedx-python-lib cannot be installed: {installed.stderr[-300:]}")
    command = [python, "-c", VALIDATOR, str(tmp_path / RELEASED / BILL)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    accepted, _, refused = done.stdout.partition("\n")
    assert accepted == "None", done.stdout + done.stderr
    assert "SHA-255" in refused
