from pathlib import Path

import pytest

from slipway.artifacts.bundle import LoadedBundle
from slipway.artifacts.certificate import (
    Execution,
    Hop,
    HopBounds,
    check_certificate,
    first_fault,
    read_certificate,
    why_uncertified,
    write_certificate,
)
from slipway.export.certification.comparison import failed, not_executed
from slipway.export.certification.verdict import (
    digest_everything,
    hop_table,
    make_certificate,
    raise_if_refused,
    refuse_changed,
    summarise,
)
from slipway.system import files
from slipway.system.errors import CertificateError, IntegrityError, ParityError
from tests.serving.bundles import write_inert_bundle

EXECUTION = Execution(backend="onnxruntime", provider="cpu", precision="fp32", variant="fp32")
GPU_HOP = not_executed("tensorrt/fp16", EXECUTION, "no GPU")


def agreeing(name: str) -> Hop:
    update = {
        "status": "agrees",
        "rows": 10,
        "max_difference": 0.0,
        "latency_ms": 1.0,
        "reference": "torch",
        "actual": EXECUTION,
    }
    return failed(name, EXECUTION, "").model_copy(update=update)


def all_hops() -> list[Hop]:
    return [agreeing(name) for name in ("torch", "onnxruntime/cpu/fp32", "http")]


def test_agreeing_hops_are_certified_and_the_service_accepts_the_certificate(
    tmp_path: Path,
) -> None:
    bundle = write_inert_bundle(tmp_path / "bundle")
    certificate = make_certificate(bundle, [*all_hops(), GPU_HOP], {}, [], draft=False)
    assert certificate.status == "certified"
    raise_if_refused(certificate, tmp_path)
    write_certificate(tmp_path / "certificate.json", certificate)
    check_certificate(read_certificate(tmp_path / "certificate.json"), bundle, accept_draft=False)


def test_a_certificate_names_the_strategies_that_trained_and_an_older_one_stays_readable(
    tmp_path: Path,
) -> None:
    bundle, path = write_inert_bundle(tmp_path / "bundle"), tmp_path / "certificate.json"
    layouts = [
        "fsdp on 2 processes with 8 rows a batch",
        "single on 1 process with 16 rows a batch",
    ]
    certificate = make_certificate(bundle, all_hops(), {}, [], training=layouts, draft=False)
    write_certificate(path, certificate)
    assert read_certificate(path).training == layouts
    older = certificate.model_dump(mode="json")
    del older["training"]
    files.write_text(path, files.canonical_json(older | {"digest": files.digest_json(older)}))
    assert read_certificate(path).training is None


@pytest.mark.parametrize("name", ["torch", "onnxruntime/cpu/fp32", "http"])
def test_certificate_is_refused_if_a_required_hop_was_not_executed(
    tmp_path: Path, name: str
) -> None:
    bundle = write_inert_bundle(tmp_path)
    absent = [hop for hop in all_hops() if hop.name != name]
    skipped = [*absent, not_executed(name, EXECUTION, "not here")]
    for hops, reason in (
        (absent, f"{name} was not compared with the trained model"),
        (skipped, f"hop {name} not executed"),
    ):
        certificate = make_certificate(bundle, hops, {}, [], draft=False)
        assert certificate.status == "refused"
        with pytest.raises(ParityError, match=reason):
            raise_if_refused(certificate, tmp_path)


def test_error_for_a_refused_certificate_names_the_differing_hop_and_its_worst_row(
    tmp_path: Path,
) -> None:
    bundle = write_inert_bundle(tmp_path)
    bad = failed("onnxruntime/cpu/int8", EXECUTION, "too far away", "torch").model_copy(
        update={"worst_row": "row5"}
    )
    certificate = make_certificate(bundle, [*all_hops(), bad], {}, [], draft=False)
    assert certificate.status == "refused"
    with pytest.raises(
        ParityError,
        match=r"hop onnxruntime/cpu/int8 differs from torch: too far away. Worst row: row5",
    ):
        raise_if_refused(certificate, tmp_path)
    with pytest.raises(CertificateError, match="onnxruntime/cpu/int8"):
        check_certificate(certificate, bundle, accept_draft=True)


def uncertified(name: str, execution: Execution) -> Hop:
    return failed(name, execution, "0.3 accuracy points lost", "torch").model_copy(
        update={"status": "uncertified", "actual": execution}
    )


def test_unserved_uncertified_variant_does_not_refuse_the_certificate(tmp_path: Path) -> None:
    bundle = write_inert_bundle(tmp_path)
    lost = uncertified("onnxruntime/cpu/fp16", EXECUTION.model_copy(update={"variant": "fp16"}))
    certificate = make_certificate(bundle, [*all_hops(), lost], {}, [], draft=False)
    assert certificate.status == "certified"
    raise_if_refused(certificate, tmp_path)
    table = hop_table(certificate.hops, bundle)
    assert "uncertified, 0.3 accuracy points lost: onnxruntime/cpu/fp16" in table
    assert summarise(certificate)["certified"] == 1


def test_an_uncertified_variant_is_served_only_on_backends_that_verify_saw_agree(
    tmp_path: Path,
) -> None:
    bundle = write_inert_bundle(tmp_path)
    on_cpu = EXECUTION.model_copy(update={"variant": "fp16"})
    on_gpu = on_cpu.model_copy(update={"backend": "tensorrt", "provider": "tensorrt"})
    lost = uncertified("onnxruntime/cpu/fp16", on_cpu)
    here = make_certificate(bundle, [*all_hops(), lost], {}, [], draft=False)
    for execution in (on_cpu, on_gpu):
        why = why_uncertified(here, execution)
        assert why is not None
        assert "onnxruntime/cpu/fp16 is uncertified: 0.3 accuracy points lost" in why
        assert "dvc repro --force verify" in why
    assert why_uncertified(here, EXECUTION) is None
    agreed = agreeing("tensorrt/fp16").model_copy(update={"requested": on_gpu, "actual": on_gpu})
    there = make_certificate(bundle, [*all_hops(), lost, agreed], {}, [], draft=False)
    assert why_uncertified(there, on_gpu) is None
    assert why_uncertified(there, on_cpu) is not None


def test_error_of_a_lossy_variant_gives_its_budget_key_and_remedies(
    tmp_path: Path,
) -> None:
    bounds = HopBounds(max_difference=None, max_score_difference=None, max_metric_loss=0.01)
    int8 = EXECUTION.model_copy(update={"variant": "int8"})
    bad = failed("onnxruntime/cpu/int8", int8, "too much lost", "torch")
    bad = bad.model_copy(update={"allowed": bounds})
    certificate = make_certificate(
        write_inert_bundle(tmp_path), [*all_hops(), bad], {}, [], draft=False
    )
    ways = r"Take 'int8' out of export.variants, raise verify.max_metric_loss.int8, or test with"
    with pytest.raises(ParityError, match=ways):
        raise_if_refused(certificate, tmp_path)


def test_error_lists_a_file_that_changed_since_the_bundle_was_made(tmp_path: Path) -> None:
    bundle = write_inert_bundle(tmp_path)
    lineage = bundle.manifest.lineage.model_copy(
        update={"digests": {"checkpoint/model.json": "a" * 64, "packed": "b" * 64}}
    )
    made = LoadedBundle(
        bundle.root, bundle.manifest.model_copy(update={"lineage": lineage}), bundle.digest
    )
    refuse_changed({"checkpoint/model.json": "a" * 64, "another": "c" * 64}, made)
    with pytest.raises(
        IntegrityError,
        match=rf"^checkpoint/model.json changed since bundle {made.version} was made from it",
    ):
        refuse_changed({"checkpoint/model.json": "c" * 64, "packed": "b" * 64}, made)


def test_first_fault_returns_the_first_bad_hop() -> None:
    hops = [agreeing("torch"), failed("a", EXECUTION, "x"), failed("b", EXECUTION, "y")]
    fault = first_fault(hops)
    assert fault is not None
    assert fault.name == "a"
    assert first_fault([*all_hops(), GPU_HOP]) is None


def test_check_certificate_accepts_a_draft_only_with_accept_draft(tmp_path: Path) -> None:
    bundle = write_inert_bundle(tmp_path)
    draft = make_certificate(bundle, all_hops()[:2], {}, [], draft=True)
    check_certificate(draft, bundle, accept_draft=True)
    with pytest.raises(CertificateError, match="its HTTP hop has not run"):
        check_certificate(draft, bundle, accept_draft=False)


def test_a_certificate_of_another_bundle_is_refused(tmp_path: Path) -> None:
    one, other = (
        write_inert_bundle(tmp_path / "one", b"1"),
        write_inert_bundle(tmp_path / "other", b"2"),
    )
    with pytest.raises(CertificateError, match="the certificate is for bundle"):
        check_certificate(
            make_certificate(one, all_hops(), {}, [], draft=False), other, accept_draft=False
        )


def test_metrics_of_verify_have_figures_for_each_executed_hop_and_no_nulls(tmp_path: Path) -> None:
    certificate = make_certificate(
        write_inert_bundle(tmp_path), [*all_hops(), GPU_HOP], {}, [], draft=False
    )
    summary = summarise(certificate)
    assert summary["certified"] == 1
    hops = {hop.pop("name"): hop for hop in summary["hops"]}
    assert hops["http"] == {
        "agrees": 1,
        "rows": 10,
        "flipped": 0,
        "max_difference": 0.0,
        "latency_ms": 1.0,
    }
    assert "tensorrt/fp16" not in hops


def test_console_table_lists_every_hop_and_has_one_line_for_all_that_did_not_run(
    tmp_path: Path,
) -> None:
    second = GPU_HOP.model_copy(update={"name": "onnxruntime/cuda/fp16"})
    grpc = GPU_HOP.model_copy(update={"name": "grpc", "reason": "no grpcio"})
    hops = [*all_hops(), GPU_HOP, grpc, second]
    table = hop_table(hops, write_inert_bundle(tmp_path)).splitlines()
    assert [line.split()[0] for line in table[1:4]] == ["torch", "onnxruntime/cpu/fp32", "http"]
    assert table[4:] == [
        "not executed, no GPU: tensorrt/fp16, onnxruntime/cuda/fp16; no grpcio: grpc"
    ]
    assert max(map(len, table)) <= 100


def test_console_table_shows_requested_and_actual_execution_if_they_differ(
    tmp_path: Path,
) -> None:
    moved = agreeing("onnxruntime/cpu/fp16").model_copy(
        update={"actual": EXECUTION.model_copy(update={"provider": "cuda"})}
    )
    bundle = write_inert_bundle(tmp_path)
    assert "cpu fp32 -> cuda fp32" in hop_table([moved], bundle)
    assert "->" not in hop_table(all_hops(), bundle)


def test_certificate_has_digests_of_every_file_that_the_hops_read(tmp_path: Path) -> None:
    bundle = write_inert_bundle(tmp_path)
    digests = digest_everything(bundle, [tmp_path / "bundle.json"])
    assert digests[(tmp_path / "bundle.json").as_posix()] == bundle.digest
    assert (
        digests[(tmp_path / "model_fp16.onnx").as_posix()] == bundle.manifest.models["fp16"].sha256
    )
