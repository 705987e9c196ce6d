from pathlib import Path
from typing import Any

import pytest

from slipway.artifacts.engine_manifest import (
    EngineRequest,
    Profile,
    check_machine,
    check_origin,
    read_passport,
    read_plan,
    read_receipt,
    read_request,
    write_engine,
    write_receipt,
)
from slipway.system import files
from slipway.system.errors import EngineError, IntegrityError, UnavailableError
from tests.export.small_bundle import MACHINE, TENSORRT_FP16, passport_for, write_small_bundle

PLAN = b"an engine"
REQUEST = EngineRequest(
    requested=TENSORRT_FP16, profile=Profile(smallest=1, optimal=4, largest=8), workspace_mib=256
)


def test_a_fitting_engine_is_read_back(tmp_path: Path) -> None:
    bundle = write_small_bundle(tmp_path / "bundle")
    write_engine(tmp_path / "engine", PLAN, passport_for(bundle, PLAN))
    passport = read_passport(tmp_path / "engine")
    check_origin(passport, bundle)
    check_machine(passport, MACHINE)
    assert read_plan(tmp_path / "engine", passport) == PLAN


def test_an_engine_of_another_graph_of_the_same_architecture_is_refused(tmp_path: Path) -> None:
    old, new = (
        write_small_bundle(tmp_path / "old", b"old weights"),
        write_small_bundle(tmp_path / "new", b"new weights"),
    )
    with pytest.raises(EngineError, match="model digest"):
        check_origin(passport_for(old, PLAN), new)


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
def test_an_engine_that_is_not_what_the_bundle_says_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], name: str
) -> None:
    bundle = write_small_bundle(tmp_path)
    with pytest.raises(EngineError, match=name):
        check_origin(passport_for(bundle, PLAN, **change), bundle)


@pytest.mark.parametrize("field", ["tensorrt_version", "gpu", "compute_capability"])
def test_an_engine_of_another_machine_is_refused_with_both_values(
    tmp_path: Path, field: str
) -> None:
    here = MACHINE.model_copy(update={field: "other"})
    with pytest.raises(EngineError, match=f"built with {getattr(MACHINE, field)}, here other"):
        check_machine(passport_for(write_small_bundle(tmp_path), PLAN), here)


def test_a_driver_update_alone_keeps_the_engine(tmp_path: Path) -> None:
    check_machine(
        passport_for(write_small_bundle(tmp_path), PLAN),
        MACHINE.model_copy(update={"driver_version": "13.2"}),
    )


@pytest.mark.parametrize("position", range(len(PLAN)))
def test_an_altered_engine_is_refused(tmp_path: Path, position: int) -> None:
    passport = passport_for(write_small_bundle(tmp_path / "bundle"), PLAN)
    altered = bytearray(PLAN)
    altered[position] ^= 1
    write_engine(tmp_path / "engine", bytes(altered), passport)
    with pytest.raises(IntegrityError, match="altered"):
        read_plan(tmp_path / "engine", passport)


def test_a_passport_other_than_the_certified_one_is_refused(tmp_path: Path) -> None:
    bundle = write_small_bundle(tmp_path / "bundle")
    write_engine(tmp_path / "engine", PLAN, passport_for(bundle, PLAN))
    certified = files.sha256_file(tmp_path / "engine/passport.json")
    assert read_passport(tmp_path / "engine", certified)
    write_engine(tmp_path / "engine", b"another engine", passport_for(bundle, b"another engine"))
    assert read_passport(tmp_path / "engine")  # fits the bundle, but was never certified
    with pytest.raises(IntegrityError, match="is not the one that was certified"):
        read_passport(tmp_path / "engine", certified)


def test_a_passport_without_its_engine_is_refused(tmp_path: Path) -> None:
    passport = passport_for(write_small_bundle(tmp_path / "bundle"), PLAN)
    with pytest.raises(EngineError, match="missing"):
        read_plan(tmp_path, passport)


def test_a_receipt_is_no_engine_and_gives_its_reason(tmp_path: Path) -> None:
    write_receipt(tmp_path, REQUEST, "no NVIDIA driver")
    receipt = read_receipt(tmp_path)
    assert receipt is not None
    assert (receipt.status, receipt.requested) == ("not_executed", TENSORRT_FP16)
    with pytest.raises(UnavailableError, match="no NVIDIA driver"):
        read_passport(tmp_path)


def test_a_passport_and_a_receipt_say_what_was_requested(tmp_path: Path) -> None:
    passport = passport_for(write_small_bundle(tmp_path / "bundle"), PLAN)
    write_engine(tmp_path / "engine", PLAN, passport)
    write_receipt(tmp_path / "receipt", REQUEST, "no NVIDIA driver")
    for root in (tmp_path / "engine", tmp_path / "receipt"):
        assert (
            EngineRequest(
                **{name: getattr(read_request(root), name) for name in EngineRequest.model_fields}
            )
            == REQUEST
        )


def test_an_empty_folder_is_no_engine(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="Run `dvc repro compile`"):
        read_passport(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ('{"format_version": 1}', "format version 1"),
        ("[]", "format version None"),
        ('{"format_version": 2}', "not a valid"),
    ],
)
def test_a_passport_that_is_not_understood_is_refused(
    tmp_path: Path, content: str, message: str
) -> None:
    files.write_text(tmp_path / "passport.json", content)
    with pytest.raises(EngineError, match=message):
        read_passport(tmp_path)


def test_a_profile_out_of_order_is_refused() -> None:
    with pytest.raises(ValueError, match="smallest <= optimal <= largest"):
        Profile(smallest=1, optimal=9, largest=8)
