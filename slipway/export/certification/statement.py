"""Writes a release's test results as an in-toto statement, for policy engines and other tools.

The statement (https://in-toto.io/Statement/v1) names every file of the bundle by its digest. Its
predicate, `test-result` 0.1, lists the quality gates and the hops of the certificate by outcome.
Thresholds, measured values and numbers of rows are annotations of each gate. The signature of the
release covers the statement; it has no envelope of its own.
"""

from typing import Any

from slipway.artifacts.bundle import LoadedBundle
from slipway.artifacts.certificate import Certificate
from slipway.artifacts.gates import GateResult
from slipway.system import files

STATEMENT = "test_result.intoto.json"
_TYPE = "https://in-toto.io/Statement/v1"
_PREDICATE = "https://in-toto.io/attestation/test-result/v0.1"


def statement_of(bundle: LoadedBundle, certificate: Certificate, seal: str) -> dict[str, Any]:
    """Return the in-toto statement of a certified bundle.

    `seal` is the SHA-256 of its certificate, in hex.
    """
    outcomes: dict[str, list[str]] = {"passed": [], "missed": [], "unjudged": []}
    for gate in certificate.gate_results:
        outcomes[gate.outcome].append(_name(gate))
    hops: dict[str, list[str]] = {"agrees": [], "differs": []}
    for hop in certificate.hops:  # those that were not executed, such as a GPU's, are no tests
        hops.setdefault(hop.status, []).append(f"hop {hop.name}")
    failed = [*outcomes["missed"], *hops["differs"]]
    warned = [*outcomes["unjudged"], *hops.get("uncertified", [])]
    return {
        "_type": _TYPE,
        "subject": [
            {"name": name, "digest": {"sha256": files.sha256_file(bundle.root / name)}}
            for name in bundle.file_names
        ],
        "predicateType": _PREDICATE,
        "predicate": {
            "result": "FAILED" if failed else "WARNED" if warned else "PASSED",
            "configuration": [
                {"name": "certificate.json", "digest": {"sha256": seal}},
                {
                    "name": "params.yaml",
                    "digest": {"sha256": files.digest_json(bundle.manifest.lineage.params)},
                },
                *map(_configuration, certificate.gate_results),
            ],
            "passedTests": [*outcomes["passed"], *hops["agrees"]],
            "warnedTests": warned,
            "failedTests": failed,
        },
    }


def _name(gate: GateResult) -> str:
    return f"gate {gate.name}{f' ({gate.where})' if gate.where else ''}"


def _configuration(gate: GateResult) -> dict[str, Any]:
    """Return a gate as JSON: its bounds, its measured value, the interval and number of rows."""
    return {
        "name": gate.key,
        "annotations": {
            "test": _name(gate),
            "min": gate.min,
            "max": gate.max,
            "measured": gate.measured.model_dump() if gate.measured else None,
        },
    }
