"""Writes the bill of materials of a release (CycloneDX 1.6): model, data, packages, licences.

https://cyclonedx.org/docs/1.6/json describes the format. cyclonedx-python-lib does not support
model cards, so it only checks the result, in the tests. The user declares the licences of data and
weights (`export.data_license`, `export.license`); those of packages come from their metadata. An
undeclared licence is left out, and a property says so. The same release gives the same bytes, so
there is no timestamp.
"""

import uuid
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from slipway.artifacts.bundle import CARD, LoadedBundle
from slipway.artifacts.certificate import Certificate
from slipway.export.certification.statement import STATEMENT
from slipway.system.version import DISTRIBUTION

BILL = "bom.cdx.json"
MODEL, DATA = "model", "data"  # references inside the bill
_LONGEST_NAME = 80  # longest name of a licence; some packages put the whole text there
_CLASSIFIER = "License :: "
_OPTIONS = {"weights": "export.license", "data": "export.data_license"}


def bill_of_materials(
    bundle: LoadedBundle, certificate: Certificate, seal: str, statement_seal: str
) -> dict[str, Any]:
    """Return the bill of materials of a certified bundle, as a JSON object.

    `seal` and `statement_seal` are the SHA-256 of its certificate and its in-toto statement, in
    hex.
    """
    versions = certificate.versions | bundle.manifest.versions
    python = versions.pop("python", None)
    packages = list(_packages(versions))
    graphs = [
        {
            "type": "file",
            "bom-ref": model.file,
            "name": model.file,
            "description": f"the ONNX graph of the variant {variant}, {model.precision}",
            "hashes": [_sha256(model.sha256)],
            **_declared("weights", license_of(bundle, "weights")),
        }
        for variant, model in bundle.manifest.models.items()
    ]
    platform = {"type": "platform", "bom-ref": "python", "name": "python", "version": python}
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, bundle.digest + seal)}",
        "version": 1,
        "metadata": {
            "component": _model(bundle, seal, statement_seal),
            "tools": {
                "components": [
                    {
                        "type": "application",
                        "name": DISTRIBUTION,
                        "version": versions.get(DISTRIBUTION, "unknown"),
                    }
                ]
            },
        },
        "components": [*graphs, _data(bundle), *([platform] if python else []), *packages],
        "dependencies": [
            {
                "ref": MODEL,
                "dependsOn": sorted([*(graph["bom-ref"] for graph in graphs), DATA]),
            }
        ],
    }


def license_of(bundle: LoadedBundle, of: str) -> str | None:
    """Return the licence that params.yaml declares for "weights" or "data".

    Returns None if it is not set.
    """
    key = _OPTIONS[of].removeprefix("export.")
    found = bundle.manifest.lineage.params.get("export", {}).get(key)
    return None if found is None else str(found)


def undeclared(bundle: LoadedBundle) -> list[str]:
    """Return the keys of params.yaml that should declare a licence but are null."""
    return [key for of, key in _OPTIONS.items() if license_of(bundle, of) is None]


def _model(bundle: LoadedBundle, seal: str, statement_seal: str) -> dict[str, Any]:
    manifest = bundle.manifest
    params = manifest.lineage.params
    references = [
        {"type": "certification-report", "url": "certificate.json", "hashes": [_sha256(seal)]},
        {"type": "attestation", "url": STATEMENT, "hashes": [_sha256(statement_seal)]},
    ]
    if manifest.card_sha256:
        hashes = [_sha256(manifest.card_sha256)]
        references.append({"type": "model-card", "url": CARD, "hashes": hashes})
    component: dict[str, Any] = {
        "type": "machine-learning-model",
        "bom-ref": MODEL,
        "name": f"{manifest.task} model",
        "version": bundle.version,
        "hashes": [_sha256(bundle.digest)],
        "externalReferences": references,
        "modelCard": _card(bundle),
        **_declared("weights", license_of(bundle, "weights")),
    }
    if pretrained := params.get("train", {}).get("pretrained"):
        described = f"pretrained weights, train.pretrained: {pretrained}"
        ancestor = {"type": "machine-learning-model", "name": str(params["train"]["network"])}
        component["pedigree"] = {"ancestors": [ancestor | {"description": described}]}
    return component


def _card(bundle: LoadedBundle) -> dict[str, Any]:
    manifest = bundle.manifest
    params = manifest.lineage.params
    parameters: dict[str, Any] = {
        "approach": {"type": "supervised"},
        "task": manifest.task,
        "datasets": [{"ref": DATA}],
        "inputs": [{"format": f"{manifest.input.dtype} {list(manifest.input.shape)}"}],
        "outputs": [{"format": manifest.output.kind}],
    }
    if network := params.get("train", {}).get("network"):
        parameters["modelArchitecture"] = str(network)
    card: dict[str, Any] = {
        "modelParameters": parameters,
        "quantitativeAnalysis": {
            "performanceMetrics": [
                {
                    "type": name,
                    "value": f"{metric.value:.6g}",
                    "slice": f"test split, {metric.rows} rows",
                    "confidenceInterval": {
                        "lowerBound": f"{metric.low:.6g}",
                        "upperBound": f"{metric.high:.6g}",
                    },
                }
                for name, metric in manifest.metrics.items()
            ]
        },
    }
    if purpose := params.get("export", {}).get("purpose"):
        card["considerations"] = {"useCases": [str(purpose).strip()]}
    return card


def _data(bundle: LoadedBundle) -> dict[str, Any]:
    """Describe the raw data as a component of the bill of materials.

    A folder has no hash, because DVC's MD5 is that of its list of files.
    """
    source = bundle.manifest.lineage.data
    path = bundle.manifest.lineage.params.get("data", {}).get("path")
    name = source.path if source else path or "unknown"
    component: dict[str, Any] = {
        "type": "data",
        "bom-ref": DATA,
        "name": name,
        "data": [{"type": "dataset", "name": name}],
        **_declared("data", license_of(bundle, "data")),
    }
    if source and source.hash == "md5" and not source.digest.endswith(".dir"):
        component["hashes"] = [{"alg": "MD5", "content": source.digest}]
    facts = {"digest": f"dvc:{source.hash}:{source.digest}"} if source else {}
    if source and source.files is not None:
        facts["files"] = str(source.files)
    packed = bundle.manifest.lineage.digests.get("data/packed/manifest.json")
    if packed:
        facts["packed-manifest"] = f"sha256:{packed}"
    component.setdefault("properties", []).extend(
        {"name": f"slipway:{name}", "value": value} for name, value in facts.items()
    )
    return component


def _packages(versions: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield a component for each package of the bundle, and for each package that these require."""
    found = {canonicalize_name(name): version for name, version in versions.items()}
    waiting = list(found)
    while waiting:
        for name in _required(waiting.pop(), found):
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
            waiting.append(name)
    for name, version in sorted(found.items()):
        declared = _license_of_package(name, version)
        yield {
            "type": "library",
            "bom-ref": f"pkg:pypi/{name}@{version}",
            "name": name,
            "version": version,
            "purl": f"pkg:pypi/{name}@{version.replace('+', '%2B')}",
            **_declared(f"the package {name}", declared),
        }


def _required(name: str, found: Mapping[Any, str]) -> Iterator[Any]:
    """Yield the names that a package requires and `found` lacks.

    Yields nothing if its version is not installed.
    """
    own = _installed(name, found[name])
    for text in own.get_all("Requires-Dist", []) if own else []:
        requirement = Requirement(text)
        required = canonicalize_name(requirement.name)
        if required not in found and (
            requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ):
            yield required


def _installed(name: str, version: str) -> Any:
    try:
        found = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return None
    return found if found["Version"] == version else None


def _license_of_package(name: str, version: str) -> str | None:
    """Return the licence in a package's metadata: the expression, the field or the classifiers."""
    found = _installed(name, version)
    if found is None:
        return None
    if found.get("License-Expression"):
        return str(found["License-Expression"])
    text = str(found.get("License") or "").strip()
    if text and "\n" not in text and len(text) <= _LONGEST_NAME and text != "UNKNOWN":
        return text
    classifiers = [
        line.rpartition(" :: ")[2]
        for line in found.get_all("Classifier", [])
        if line.startswith(_CLASSIFIER)
    ]
    return " and ".join(classifiers) or None


def _declared(of: str, license_: str | None) -> dict[str, Any]:
    """Return the field `licenses`, or a property stating that no licence is declared."""
    if license_ is None:
        remedy = f": set {_OPTIONS[of]} in params.yaml" if of in _OPTIONS else ""
        return {"properties": [{"name": "slipway:license", "value": f"NOASSERTION{remedy}"}]}
    expression = as_spdx(license_)
    entry = {"expression": expression} if expression else {"license": {"name": license_}}
    return {"licenses": [entry]}


def as_spdx(license_: str) -> str | None:
    """Return the licence as an SPDX expression; None if it is not one."""
    try:
        return canonicalize_license_expression(license_)
    except InvalidLicenseExpression:
        return None


def _sha256(digest: str) -> dict[str, str]:
    return {"alg": "SHA-256", "content": digest}
