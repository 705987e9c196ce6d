"""verify: compares bundle, engine and running service with the trained network on every test row.

The result is the certificate.
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from slipway.artifacts.bundle import LoadedBundle, load_bundle
from slipway.artifacts.certificate import first_fault, write_certificate
from slipway.artifacts.engine_manifest import ENGINE_MANIFEST
from slipway.artifacts.gates import gates_text, not_passed, read_gates
from slipway.artifacts.locations import (
    BUNDLE,
    CALIBRATION,
    CERTIFICATE,
    ENGINE,
    GATES,
    METRICS,
    MODEL,
    OOD_SCORE,
    PACKED,
    VERIFIED,
)
from slipway.artifacts.uncertainty import read_calibration
from slipway.config.params import Params
from slipway.config.stage_run import run_stage
from slipway.data.sources.archives import ArchiveLimits, unpacked
from slipway.metrics.scores import Resampling
from slipway.system import files

if TYPE_CHECKING:
    from slipway.export.certification.comparison import HopComparison
    from slipway.export.certification.hops import Measured

ENGINE_CACHE = Path(".work/engine_cache")  # the service uses the same cache
PAGE = Path("reports/verify.html")
DRAFT = Path(".work/verify/certificate.json")
# A folder that does not exist, because the certificate covers no engine rebuilt on one machine.
NO_ENGINE = Path(".work/verify/no_engine")
SERVICE_LOG = Path(".work/verify/service.log")


def run(params: Params) -> None:
    """Run every hop, write the certificate, and fail if it is refused."""
    from slipway.export.certification import verdict
    from slipway.export.certification.comparison import HopComparison
    from slipway.export.certification.hops import HopRunner
    from slipway.export.certification.measurement import read_test_rows
    from slipway.reports.pages.verify_page import HopAnswers, verify_page
    from slipway.training.networks.networks import (
        load_network,
        read_model_manifest,
        weights_file,
    )
    from slipway.training.uncertainty.calibrated_network import calibrated

    bundle, trained = load_bundle(BUNDLE), load_network(MODEL)
    bundle.verify()
    network = calibrated(
        trained, read_calibration(CALIBRATION, bundle.manifest.calibration), OOD_SCORE
    )
    rows = read_test_rows(PACKED, trained.spec.classes)
    comparison = HopComparison(
        rows, Resampling(params.seed, params.evaluate.bootstrap_samples, params.evaluate.confidence)
    )
    read = [
        BUNDLE / "bundle.json",
        MODEL / "model.json",
        MODEL / weights_file(trained.spec.name),
        PACKED / "manifest.json",
    ]
    read += [CALIBRATION, OOD_SCORE, GATES, METRICS]
    digests = verdict.digest_everything(bundle, read + sorted(ENGINE.glob("*")))
    gates = read_gates(GATES)
    verdict.refuse_changed({judged.path: judged.sha256 for judged in gates.judged}, bundle)
    engine_digest = digests.get((ENGINE / ENGINE_MANIFEST).as_posix())

    runner = HopRunner(comparison, bundle, network, params.verify)
    measured = [
        runner.torch,
        *runner.run_onnx(),
        *runner.run_onnx_tensorrt(ENGINE, ENGINE_CACHE),
        runner.run_engine(ENGINE, engine_digest),
    ]
    manifest = read_model_manifest(MODEL)
    certify = partial(
        verdict.make_certificate,
        bundle,
        digests=digests,
        gates=gates.results,
        user_code=verdict.user_code_of(bundle, manifest.user_code, METRICS),
        training=[str(segment) for segment in manifest.segments],
        engine_digest=engine_digest,
    )
    write_certificate(DRAFT, certify([hop for hop, _ in measured], draft=True))
    measured.extend(_run_service(params, comparison, bundle, measured))

    hops = [hop for hop, _ in measured]
    if first_fault(hops) is None:  # else the certificate names the hop at fault
        verdict.refuse_changed(digests, bundle)
    certificate = certify(hops, draft=False)
    write_certificate(CERTIFICATE, certificate)
    files.write_json(VERIFIED, verdict.summarise(certificate))
    shown = HopAnswers(
        rows.task,
        rows.classes,
        rows.ids,
        rows.sources,
        rows.targets,
        rows.inputs,
        {hop.name: answered.outputs for hop, answered in measured if answered},
        {hop.name: answered.thresholds for hop, answered in measured if answered},
    )
    files.write_text(PAGE, verify_page(certificate, shown, bundle.manifest.input))
    print(verdict.hop_table(hops, bundle), gates_text(gates.results), sep="\n")
    verdict.raise_if_refused(certificate, CERTIFICATE)
    if not not_passed(gates.results):
        print(f"now: `slipway serve` starts the service; {PAGE} compares the hops")


def _run_service(
    params: Params, comparison: "HopComparison", bundle: LoadedBundle, measured: "list[Measured]"
) -> "list[Measured]":
    from slipway.export.certification.http_hop import raw_payloads
    from slipway.export.certification.service_hop import ServiceHop, not_tried
    from slipway.export.certification.service_process import serve_command

    fault = first_fault([hop for hop, _ in measured])
    if fault:
        return [(hop, None) for hop in not_tried(fault)]
    files_to_serve = {
        "SLIPWAY_BUNDLE": BUNDLE,
        "SLIPWAY_ENGINE": ENGINE,
        "SLIPWAY_CERTIFICATE": DRAFT,
        "SLIPWAY_REBUILT_ENGINE": NO_ENGINE,
    }
    settings = {name: str(path.resolve()) for name, path in files_to_serve.items()} | {
        "SLIPWAY_ACCEPT_DRAFT": "true"
    }
    service = ServiceHop(serve_command(), settings, SERVICE_LOG)
    data = unpacked(
        params.data,
        ArchiveLimits(params.clean.max_archive_members, params.clean.max_archive_ratio),
    )
    return service.run(
        comparison,
        bundle,
        measured,
        lambda: raw_payloads(data, bundle.manifest.input, comparison.rows),
        params.verify,
    )


if __name__ == "__main__":
    run_stage(run)
