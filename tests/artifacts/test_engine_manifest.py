from pathlib import Path
from typing import Any

import pytest

from slipway.artifacts.engine_manifest import (
    CPU_ONLY,
    NO_GRAPH,
    EngineRequest,
    Profile,
    check_machine,
    check_origin,
    read_engine_manifest,
    read_plan,
    read_request,
    read_skipped_build,
    write_engine,
    write_skipped_build,
)
from slipway.system import files
from slipway.system.errors import EngineError, IntegrityError, UnavailableError
from tests.serving.bundles import (
    MACHINE,
    TENSORRT_FP16,
    engine_manifest_for,
    write_inert_bundle,
)

PLAN = b"an engine"
REQUEST = EngineRequest(
    requested=TENSORRT_FP16, profile=Profile(smallest=1, optimal=4, largest=8), workspace_mib=256
)


def test_a_matching_engine_is_read_back(tmp_path: Path) -> None:
    bundle = write_inert_bundle(tmp_path / "bundle")
    write_engine(tmp_path / "engine", PLAN, engine_manifest_for(bundle, PLAN))
    engine_manifest = read_engine_manifest(tmp_path / "engine")
    check_origin(engine_manifest, bundle)
    check_machine(engine_manifest, MACHINE)
    assert read_plan(tmp_path / "engine", engine_manifest) == PLAN


def test_an_engine_of_another_graph_of_the_same_architecture_is_refused(tmp_path: Path) -> None:
    old, new = (
        write_inert_bundle(tmp_path / "old", b"old weights"),
        write_inert_bundle(tmp_path / "new", b"new weights"),
    )
    with pytest.raises(EngineError, match="model digest"):
        check_origin(engine_manifest_for(old, PLAN), new)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"profile": Profile(smallest=1, optimal=2, largest=4)}, "largest batch"),
        ({"actual": TENSORRT_FP16.model_copy(update={"precision": "fp32"})}, "precision"),
        ({"actual": TENSORRT_FP16.model_copy(update={"precision": "fp32"})}, "requested execution"),
        (
            {"actual": TENSORRT_FP16.model_copy(update={"variant": "int8_tensorrt"})},
            "no variant 'int8_tensorrt'",
        ),
    ],
)
def test_error_names_the_difference_between_engine_and_bundle(
    tmp_path: Path, change: dict[str, Any], name: str
) -> None:
    bundle = write_inert_bundle(tmp_path)
    with pytest.raises(EngineError, match=name):
        check_origin(engine_manifest_for(bundle, PLAN, **change), bundle)


@pytest.mark.parametrize("field", ["tensorrt_version", "gpu", "compute_capability"])
def test_error_for_an_engine_of_a_different_machine_names_both_values_of_each_difference(
    tmp_path: Path, field: str
) -> None:
    here = MACHINE.model_copy(update={field: "other"})
    with pytest.raises(EngineError, match=f"built with {getattr(MACHINE, field)}, here other"):
        check_machine(engine_manifest_for(write_inert_bundle(tmp_path), PLAN), here)


def test_a_driver_update_does_not_invalidate_the_engine(tmp_path: Path) -> None:
    check_machine(
        engine_manifest_for(write_inert_bundle(tmp_path), PLAN),
        MACHINE.model_copy(update={"driver_version": "13.2"}),
    )


@pytest.mark.parametrize("position", range(len(PLAN)))
def test_an_altered_engine_is_refused(tmp_path: Path, position: int) -> None:
    engine_manifest = engine_manifest_for(write_inert_bundle(tmp_path / "bundle"), PLAN)
    altered = bytearray(PLAN)
    altered[position] ^= 1
    write_engine(tmp_path / "engine", bytes(altered), engine_manifest)
    with pytest.raises(IntegrityError, match="altered"):
        read_plan(tmp_path / "engine", engine_manifest)


def test_an_engine_manifest_other_than_the_certified_one_is_refused(tmp_path: Path) -> None:
    bundle = write_inert_bundle(tmp_path / "bundle")
    write_engine(tmp_path / "engine", PLAN, engine_manifest_for(bundle, PLAN))
    certified = files.sha256_file(tmp_path / "engine/engine_manifest.json")
    assert read_engine_manifest(tmp_path / "engine", certified)
    write_engine(
        tmp_path / "engine", b"another engine", engine_manifest_for(bundle, b"another engine")
    )
    assert read_engine_manifest(tmp_path / "engine")  # fits the bundle, but was never certified
    with pytest.raises(IntegrityError, match="is not the certified one"):
        read_engine_manifest(tmp_path / "engine", certified)


def test_an_engine_manifest_without_its_engine_is_refused(tmp_path: Path) -> None:
    engine_manifest = engine_manifest_for(write_inert_bundle(tmp_path / "bundle"), PLAN)
    with pytest.raises(EngineError, match="missing"):
        read_plan(tmp_path, engine_manifest)


def test_error_for_a_skipped_build_gives_its_reason(tmp_path: Path) -> None:
    write_skipped_build(tmp_path, REQUEST, "no NVIDIA driver")
    skipped_build = read_skipped_build(tmp_path)
    assert skipped_build is not None
    assert (skipped_build.status, skipped_build.requested) == ("not_executed", TENSORRT_FP16)
    with pytest.raises(UnavailableError, match="no NVIDIA driver"):
        read_engine_manifest(tmp_path)


def test_error_for_a_graph_for_the_cpu_only_proposes_no_other_machine(tmp_path: Path) -> None:
    write_skipped_build(tmp_path, REQUEST, "no NVIDIA driver")
    with pytest.raises(UnavailableError, match="Run `dvc repro compile` on a machine with a GPU"):
        read_engine_manifest(tmp_path)
    write_skipped_build(
        tmp_path, REQUEST, f"TensorRT cannot run the graph fp32, which is {CPU_ONLY}"
    )
    with pytest.raises(UnavailableError, match=r"for the CPU only\. No machine can build one\.$"):
        read_engine_manifest(tmp_path)
    write_skipped_build(tmp_path, REQUEST, f"the graph has trees; {NO_GRAPH}")
    with pytest.raises(UnavailableError, match=r"no such graph\. No machine can build one\.$"):
        read_engine_manifest(tmp_path)


def test_engine_manifest_and_skipped_build_both_record_the_requested_execution(
    tmp_path: Path,
) -> None:
    engine_manifest = engine_manifest_for(write_inert_bundle(tmp_path / "bundle"), PLAN)
    write_engine(tmp_path / "engine", PLAN, engine_manifest)
    write_skipped_build(tmp_path / "skipped_build", REQUEST, "no NVIDIA driver")
    for root in (tmp_path / "engine", tmp_path / "skipped_build"):
        assert (
            EngineRequest(
                **{name: getattr(read_request(root), name) for name in EngineRequest.model_fields}
            )
            == REQUEST
        )


def test_an_empty_folder_is_not_accepted_as_an_engine(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="Run `dvc repro compile`"):
        read_engine_manifest(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ('{"format_version": 1}', "format version 1"),
        ("[]", "format version None"),
        ('{"format_version": 2}', "not a valid"),
    ],
)
def test_a_malformed_engine_manifest_is_refused(tmp_path: Path, content: str, message: str) -> None:
    files.write_text(tmp_path / "engine_manifest.json", content)
    with pytest.raises(EngineError, match=message):
        read_engine_manifest(tmp_path)


def test_profile_whose_batch_sizes_are_out_of_order_is_refused() -> None:
    with pytest.raises(ValueError, match="smallest <= optimal <= largest"):
        Profile(smallest=1, optimal=9, largest=8)
