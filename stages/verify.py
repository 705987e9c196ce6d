"""Bundle, engine and running service against the trained network on every test row: the certificate."""

from pathlib import Path

from slipway import files
from slipway.bundle import load_bundle
from slipway.certificate import write_certificate
from slipway.command import run_stage
from slipway.data.packed import open_split, read_manifest
from slipway.data.sources import read_samples
from slipway.metrics import Resampling
from slipway.params import Params

PACKED = Path("data/packed")
CHECKPOINT = Path("artifacts/checkpoint")
BUNDLE = Path("artifacts/bundle")
ENGINE = Path("artifacts/engine")
CERTIFICATE = Path("artifacts/certificate.json")
METRICS = Path("metrics/verify.json")
DRAFT = Path(".work/verify/certificate.json")
SERVICE_LOG = Path(".work/verify/service.log")


def run(params: Params) -> None:
    """Run every hop, write the certificate, and fail if it is refused."""
    from slipway.export.certification import digest_everything, first_fault, hop_table, make_certificate, raise_if_refused, summarise
    from slipway.export.comparison import Comparison, TestRows, not_executed
    from slipway.export.hops import HopRunner
    from slipway.export.http_hop import original_payloads
    from slipway.export.service_hop import AUTO, NAME, ServiceHop
    from slipway.export.service_process import serve_command
    from slipway.training.networks import load_network

    bundle, manifest, network = load_bundle(BUNDLE), read_manifest(PACKED), load_network(CHECKPOINT)
    bundle.verify()
    split = open_split(PACKED, manifest, "test", verify=True)
    rows = TestRows(manifest.task, network.spec.classes, split.ids, split.images, split.targets)
    evaluate = params.evaluate
    comparison = Comparison(rows, Resampling(params.seed, evaluate.bootstrap_samples, evaluate.confidence))
    read = [BUNDLE / "bundle.json", CHECKPOINT / "model.json", CHECKPOINT / "weights.safetensors", PACKED / "manifest.json"]
    digests = digest_everything(bundle, read + sorted(ENGINE.iterdir()))

    runner = HopRunner(comparison, bundle, network, params.verify)
    measured = [runner.torch, *runner.run_onnx(), runner.run_engine(ENGINE)]
    hops = [hop for hop, _ in measured]
    write_certificate(DRAFT, make_certificate(bundle, hops, digests, draft=True))
    fault = first_fault(hops)
    if fault:
        hops.append(not_executed(NAME, AUTO, f"{fault.name} comes first and differs"))
    else:
        positions = {source: position for position, source in enumerate(split.sources)}
        payloads = original_payloads(read_samples(params.data, wanted=positions.keys()), positions, split.ids)
        settings = {"SLIPWAY_BUNDLE": BUNDLE, "SLIPWAY_ENGINE": ENGINE, "SLIPWAY_CERTIFICATE": DRAFT}
        service = ServiceHop(
            serve_command(), {name: str(path.resolve()) for name, path in settings.items()} | {"SLIPWAY_ACCEPT_DRAFT": "true"}, SERVICE_LOG
        )
        hops.append(service.run(comparison, bundle, measured, payloads, params.verify))

    certificate = make_certificate(bundle, hops, digests, draft=False)
    print(hop_table(hops, manifest.task))
    write_certificate(CERTIFICATE, certificate)
    files.write_json(METRICS, summarise(certificate))
    raise_if_refused(certificate, CERTIFICATE)


if __name__ == "__main__":
    run_stage(run)
