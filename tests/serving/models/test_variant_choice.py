"""The service runs the variant that export chose or the user named, if it is certified."""

import os
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from slipway.artifacts.bundle import Choice, LoadedBundle, describe_model, load_bundle
from slipway.artifacts.certificate import read_certificate
from slipway.predictor.selection import select
from slipway.runtimes import runtime
from slipway.serving.models.loader import load_model
from slipway.system.errors import (
    BundleError,
    UnavailableError,
)
from tests.serving.bundles import (
    certify,
    hop,
    write_bundle,
)
from tests.serving.conftest import MakeSettings


def bundle_with_variants(root: Path) -> LoadedBundle:
    """Write a bundle with fp32, fp16 and int8 of the same graph."""
    plain = write_bundle(root)
    model = root / "model_fp32.onnx"
    variants = {"fp32": model, "fp16": root / "model_fp16.onnx", "int8": root / "model_int8.onnx"}
    for path in variants.values():
        path.write_bytes(model.read_bytes())
    models = {variant: describe_model(path, "fp32", ["cpu"]) for variant, path in variants.items()}
    models = {
        variant: entry.model_copy(update={"precision": variant})
        for variant, entry in models.items()
    }
    assert plain.manifest.models
    return write_bundle(root, models=models)


def choose(root: Path, variant: str, provider: str = "cpu") -> LoadedBundle:
    """Write the bundle with fp32, fp16 and int8, and `variant` chosen for a provider."""
    content = {
        "variant": variant, "max_metric_loss": 0.005, "prefer": "fastest",
        "reason": "It is 2 times as fast.", "figures": {},
        "hardware": {},
    }  # fmt: skip
    models = bundle_with_variants(root).manifest.models
    return write_bundle(
        root,
        models=models,
        choice={provider: Choice.model_validate(content)},
        left_out={"int8_dynamic": "no products"},
    )


def test_auto_serves_the_variant_that_export_chose_and_model_info_gives_the_reason(
    certified: Path, make_settings: MakeSettings
) -> None:
    hops = [hop(variant="fp32"), hop(variant="int8")]
    certify(certified / "certificate.json", choose(certified / "bundle", "int8"), hops)
    model = load_model(make_settings(provider="cpu"))
    assert (model.selection.actual.variant, model.selection.passed_over) == ("int8", [])
    assert model.info()["execution"]["why"] == "chosen at export. It is 2 times as fast."
    assert model.info()["choice"]["cpu"]["max_metric_loss"] == 0.005
    named = load_model(make_settings(provider="cpu", variant="fp32")).selection
    assert (named.actual.variant, named.why) == ("fp32", "set by name")


@pytest.mark.parametrize(
    ("variant", "num_inside", "is_ood"), [("int8", 3, False), ("fp32", 1, True)]
)
def test_variant_with_its_own_calibration_is_served_with_it(
    certified: Path, make_settings: MakeSettings, variant: str, num_inside: int, is_ood: bool
) -> None:
    """Control: in fp32 sets have labels from 0.25, and OOD scores begin at 0.75."""
    plain = bundle_with_variants(certified / "bundle").manifest
    own = plain.calibration.model_copy(
        update={
            "conformal": plain.calibration.conformal.model_copy(update={"threshold": 0.01}),
            "ood": plain.calibration.ood.model_copy(update={"threshold": 5.0}),
        }
    )
    models = plain.models | {"int8": plain.models["int8"].model_copy(update={"calibration": own})}
    hops = [hop(variant="fp32"), hop(variant="int8")]
    certify(certified / "certificate.json", write_bundle(certified / "bundle", models=models), hops)
    model = load_model(make_settings(provider="cpu", variant=variant))
    answer = model.answer(np.array([0.8, 0.15, 0.05], dtype=np.float32), np.float32(2.0))
    assert (len(answer["prediction_set"]), answer["is_ood"]) == (num_inside, is_ood)
    assert model.info()["calibration"] == (
        own if variant == "int8" else plain.calibration
    ).model_dump(mode="json")


@pytest.mark.parametrize("status", ["differs", "not_executed"])
def test_auto_serves_fp32_if_the_chosen_variant_is_uncertified_and_gives_the_reason(
    certified: Path, make_settings: MakeSettings, status: Literal["differs", "not_executed"]
) -> None:
    hops = [hop(variant="fp32"), hop(variant="int8", status=status)]
    certify(certified / "certificate.json", choose(certified / "bundle", "int8"), hops)
    selection = load_model(make_settings(provider="cpu")).selection
    assert selection.actual.variant == "fp32"
    assert selection.passed_over[0].startswith("cpu/int8: the certificate ")
    assert selection.why == "export chose int8 for cpu, which was passed over"


def test_a_choice_of_export_applies_only_to_its_provider(
    certified: Path, make_settings: MakeSettings
) -> None:
    hops = [hop(variant="fp32"), hop(variant="int8")]
    certify(certified / "certificate.json", choose(certified / "bundle", "int8", "cuda"), hops)
    selection = load_model(make_settings(provider="cpu")).selection
    assert (selection.actual.variant, selection.passed_over) == ("fp32", [])
    assert "export chose no variant for it" in selection.why


def test_a_choice_is_read_from_the_bundle_and_an_unknown_variant_is_refused(tmp_path: Path) -> None:
    choice = choose(tmp_path, "int8").manifest.choice["cpu"]
    assert (choice.variant, choice.reason) == ("int8", "It is 2 times as fast.")
    with pytest.raises(BundleError, match=r"choice\.cpu names int4, models has fp16, fp32, int8"):
        choose(tmp_path, "int4")


def test_a_variant_left_out_of_the_bundle_is_refused_with_the_reason(
    certified: Path, make_settings: MakeSettings
) -> None:
    certify(certified / "certificate.json", choose(certified / "bundle", "fp32"))
    with pytest.raises(UnavailableError, match="it was left out: no products"):
        load_model(make_settings(provider="cpu", variant="int8_dynamic"))


def test_auto_serves_fp32_on_the_cpu_and_lists_the_unavailable_providers(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        runtime, "why_unavailable", lambda provider: None if provider == "cpu" else "no such device"
    )
    selection = load_model(make_settings()).selection
    assert (selection.actual.provider, selection.actual.variant) == ("cpu", "fp32")
    assert [reason.split(":")[0] for reason in selection.passed_over] == [
        "tensorrt/any",
        "cuda/fp16",
        "cuda/fp32",
    ]


def test_a_provider_and_variant_set_by_name_are_used(
    certified: Path, make_settings: MakeSettings
) -> None:
    certify(
        certified / "certificate.json",
        bundle_with_variants(certified / "bundle"),
        [hop(variant="fp32"), hop(variant="int8")],
    )
    selection = load_model(make_settings(provider="cpu", variant="int8")).selection
    assert (selection.actual.variant, selection.actual.precision, selection.passed_over) == (
        "int8",
        "int8",
        [],
    )


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"provider": "cuda"}, "cuda/fp16: no such device"),
        ({"provider": "tensorrt"}, "tensorrt/any: .* holds no engine"),
        ({"variant": "int8_tensorrt"}, "the bundle has no such variant, it has fp16, fp32, int8"),
        ({"variant": "fp16"}, "the certificate has no run of onnxruntime/cpu/fp16"),
        (
            {"provider": "cpu", "variant": "int8"},
            "the certificate says that the export onnxruntime/cpu/int8 differs: planted",
        ),
    ],
)
def test_an_unavailable_provider_or_variant_is_refused_and_never_replaced(
    certified: Path,
    make_settings: MakeSettings,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    reason: str,
) -> None:
    monkeypatch.setattr(
        runtime, "why_unavailable", lambda provider: None if provider == "cpu" else "no such device"
    )
    hops = [
        hop(variant="fp32"),
        hop(variant="int8", status="differs"),
        hop(variant="fp16", status="not_executed"),
    ]
    certify(certified / "certificate.json", bundle_with_variants(certified / "bundle"), hops)
    assert load_model(make_settings(provider="cpu")).selection.actual.variant == "fp32"
    with pytest.raises(UnavailableError, match=reason):
        load_model(make_settings(**variables))


def test_the_certificate_must_cover_the_provider_that_runs(
    certified: Path, make_settings: MakeSettings
) -> None:
    bundle = load_bundle(certified / "bundle")
    certificate = read_certificate(
        certify(certified / "certificate.json", bundle, [hop(provider="cuda")])
    )
    with pytest.raises(UnavailableError, match="no run of onnxruntime/cpu/fp32"):
        select(make_settings().model_options(), bundle, certificate)


def test_threads_of_all_workers_together_equal_the_number_of_cores(
    make_settings: MakeSettings,
) -> None:
    assert make_settings(workers=os.cpu_count() or 1).threads_per_worker() == 1
