import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from slipway.artifacts.bundle import Choice, LoadedBundle, describe_model, load_bundle
from slipway.artifacts.certificate import Execution, read_certificate
from slipway.artifacts.engine_manifest import (
    EngineManifest,
    Profile,
    read_engine_manifest,
    read_plan,
    write_engine,
)
from slipway.inputs.columns import Column, ColumnContract
from slipway.inputs.images import TransformContract
from slipway.inputs.user_function import code_digest, load
from slipway.predictor import loader
from slipway.predictor.model import InvalidAnswerError
from slipway.predictor.selection import select
from slipway.runtimes import engine_runner, runtime
from slipway.runtimes.runtime import Runner
from slipway.serving import settings as settings_module
from slipway.serving.models.loader import load_model
from slipway.system import files
from slipway.system.errors import (
    BundleError,
    CertificateError,
    IntegrityError,
    SlipwayError,
    UnavailableError,
)
from tests.serving.bundles import (
    COLUMNS,
    CONTRACT,
    LABELS,
    certify,
    classifier,
    column,
    hop,
    log_of_mean,
    probabilities,
    row_classifier,
    row_probabilities,
    row_sum,
    write_bundle,
)
from tests.serving.conftest import MakeSettings
from tests.small_bundle import MACHINE
from tests.user_functions import WriteFunctions, _write_functions  # noqa: F401 - a fixture

ENGINE_FP32 = Execution(backend="tensorrt", provider="tensorrt", precision="fp32", variant="fp32")


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


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def newer_format(root: Path) -> None:
    content = json.loads((root / "bundle/bundle.json").read_text())
    (root / "bundle/bundle.json").write_text(json.dumps(content | {"format_version": 8}))


def older_format(root: Path) -> None:
    content = json.loads((root / "bundle/bundle.json").read_text())
    del content["baseline"]
    (root / "bundle/bundle.json").write_text(json.dumps(content | {"format_version": 4}))


def other_bundle(root: Path) -> None:
    certify(root / "certificate.json", write_bundle(root / "other", max_batch_size=4))


def test_certified_bundle_is_loaded_and_predicts(make_settings: MakeSettings) -> None:
    model = load_model(make_settings())
    pixels = np.random.default_rng(0).integers(0, 256, (5, *CONTRACT.shape), dtype=np.uint8)
    assert np.allclose(model.run(pixels).outputs, probabilities(pixels), atol=1e-6)
    assert model.max_batch_size == 16


@pytest.mark.parametrize(
    ("spoil", "error", "reason"),
    [
        (lambda root: flip_a_byte(root / "bundle/model_fp32.onnx"), BundleError, "was altered"),
        (lambda root: (root / "bundle/model_fp32.onnx").unlink(), BundleError, "is missing"),
        (lambda root: (root / "bundle/bundle.json").unlink(), BundleError, "is not a bundle"),
        (lambda root: (root / "bundle/bundle.json").write_text("{"), BundleError, "is not JSON"),
        (newer_format, BundleError, "format version 8"),
        (older_format, BundleError, "format version 4, this Slipway reads version 7"),
        (
            lambda root: (root / "certificate.json").unlink(),
            CertificateError,
            "nothing proves this bundle",
        ),
        (
            lambda root: (root / "certificate.json").write_text("[]"),
            CertificateError,
            "format version",
        ),
        (other_bundle, CertificateError, "the certificate is for bundle"),
        (
            lambda root: certify(
                root / "certificate.json", load_bundle(root / "bundle"), status="refused"
            ),
            CertificateError,
            "'refused'",
        ),
        (
            lambda root: certify(
                root / "certificate.json", load_bundle(root / "bundle"), status="draft"
            ),
            CertificateError,
            "'draft'",
        ),
    ],
)
def test_unverified_bundles_and_certificates_are_not_served(
    certified: Path,
    make_settings: MakeSettings,
    spoil: Callable[[Path], None],
    error: type[SlipwayError],
    reason: str,
) -> None:
    assert load_model(make_settings())
    spoil(certified)
    with pytest.raises(error, match=reason):
        load_model(make_settings())


def test_a_bundle_with_an_uncertified_user_function_is_not_served(
    certified: Path, make_settings: MakeSettings, write_functions: WriteFunctions
) -> None:
    folder = write_functions("faces", {"__init__.py": "def f(image):\n    return image\n"})
    transform = TransformContract(function="faces:f", sha256=code_digest("faces:f"))
    contract = CONTRACT.model_copy(update={"transform": transform})
    certify(certified / "certificate.json", write_bundle(certified / "bundle", input=contract))
    assert load_model(make_settings())
    load.cache_clear()  # as in a new process
    (folder / "__init__.py").write_text("def f(image):\n    return image.rotate(90)\n")
    with pytest.raises(IntegrityError, match="the code of faces:f has the SHA-256"):
        load_model(make_settings())
    (folder / "__init__.py").unlink()
    with pytest.raises(UnavailableError, match="has no Python file here"):
        load_model(make_settings())


def test_a_draft_certificate_is_served_only_if_drafts_are_accepted(
    certified: Path, make_settings: MakeSettings
) -> None:
    certify(certified / "certificate.json", load_bundle(certified / "bundle"), status="draft")
    assert load_model(make_settings(accept_draft="true"))


def test_the_batch_size_may_equal_but_not_exceed_that_of_the_bundle(
    make_settings: MakeSettings,
) -> None:
    assert load_model(make_settings(max_batch_size=16)).max_batch_size == 16
    with pytest.raises(
        BundleError, match="SLIPWAY_MAX_BATCH_SIZE is 17, the bundle takes at most 16"
    ):
        load_model(make_settings(max_batch_size=17))


def test_warm_up_refuses_a_graph_that_contradicts_its_bundle(
    certified: Path, make_settings: MakeSettings
) -> None:
    for contract in (
        CONTRACT.model_copy(update={"size_px": 9}),
        CONTRACT.model_copy(update={"channels": 1}),
    ):
        certify(certified / "certificate.json", write_bundle(certified / "bundle", input=contract))
        with pytest.raises(BundleError, match="the model refuses"):
            load_model(make_settings())


def test_bundle_for_table_rows_is_loaded_and_predicts(
    certified_table: Path, make_settings: MakeSettings
) -> None:
    model = load_model(make_settings())
    rows = np.random.default_rng(0).normal(size=(5, *COLUMNS.shape)).astype(np.float32)
    assert np.allclose(model.run(rows).outputs, row_probabilities(rows), atol=1e-6)


def test_example_inputs_of_a_table_are_valid_rows() -> None:
    rows = COLUMNS.example_rows(16)
    assert (rows.dtype.name, rows.shape) == ("float32", (16, *COLUMNS.shape))
    values, indicators, codes = np.split(
        rows, [len(COLUMNS.numeric), len(COLUMNS.numeric) + len(COLUMNS.indicated)], axis=1
    )
    assert np.abs(values).max() <= 1
    assert set(indicators.ravel()) == {0, 1}
    assert [set(column) for column in codes.T] == [{1, 2, 3}, {0, 1, 2}]


@pytest.mark.parametrize(
    "contract", [[column("age")], [column(str(number)) for number in range(20)]]
)
def test_warm_up_refuses_a_table_graph_that_contradicts_its_columns(
    certified: Path, make_settings: MakeSettings, contract: list[Column]
) -> None:
    for graph in (row_classifier(), row_sum()):
        changed = write_bundle(
            certified / "bundle", graph, input=ColumnContract(kind="columns", columns=contract)
        )
        certify(certified / "certificate.json", changed)
        with pytest.raises(BundleError, match="the model refuses"):
            load_model(make_settings())


@pytest.mark.parametrize("columns", [[], [column("age"), column("age")]])
def test_bundle_with_ambiguous_columns_is_not_served(
    certified: Path, make_settings: MakeSettings, columns: list[Column]
) -> None:
    contract = ColumnContract(kind="columns", columns=columns)
    certify(
        certified / "certificate.json",
        write_bundle(certified / "bundle", row_classifier(), input=contract),
    )
    with pytest.raises(BundleError, match="expected one or more different names"):
        load_model(make_settings())


def test_warm_up_measures_which_batch_sizes_are_quick(
    certified: Path, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "QUICK_S", 10.0)
    assert load_model(make_settings(max_batch_size=6)).quick_rows == 6
    monkeypatch.setattr(loader, "_seconds", lambda run, batch: 0.002 * len(batch))
    monkeypatch.setattr(loader, "QUICK_S", 0.005)
    assert load_model(make_settings()).quick_rows == 2
    monkeypatch.setattr(loader, "QUICK_S", 0.001)
    assert load_model(make_settings()).quick_rows == 0


@pytest.mark.parametrize(
    ("quick_with_one", "asked_for", "expected"),
    [(True, 0, [2, 1]), (False, 0, [2, 1]), (True, 2, [2])],
)
def test_model_whose_largest_batch_is_quick_runs_on_one_thread(
    certified: Path,
    make_settings: MakeSettings,
    monkeypatch: pytest.MonkeyPatch,
    quick_with_one: bool,
    asked_for: int,
    expected: list[int],
) -> None:
    """Waking threads takes longer than it saves, unless a batch needs them or the user set them."""
    opened: list[int] = []
    open_session = runtime._open_session

    def noting(model: bytes, providers: list[Any], num_threads: int, what: str) -> Any:
        opened.append(num_threads)
        return open_session(model, providers, num_threads, what)

    def seconds(run: Any, batch: Any) -> float:
        return 0.0 if opened[-1] > 1 or quick_with_one else 1.0

    monkeypatch.setattr(runtime, "_open_session", noting)
    monkeypatch.setattr(settings_module, "num_cores", lambda: 2)
    monkeypatch.setattr(loader, "_seconds", seconds)
    model = load_model(make_settings(num_threads=asked_for))
    assert opened == expected
    assert model.quick_rows == model.max_batch_size
    options = model.selection.runner._session.get_session_options()  # type: ignore[attr-defined]
    assert options.intra_op_num_threads == (1 if quick_with_one and not asked_for else 2)


def test_warm_up_refuses_a_bundle_with_fewer_labels_than_outputs(
    certified: Path, make_settings: MakeSettings
) -> None:
    output = load_bundle(certified / "bundle").manifest.output.model_copy(
        update={"labels": LABELS[:2]}
    )
    certify(certified / "certificate.json", write_bundle(certified / "bundle", output=output))
    with pytest.raises(
        InvalidAnswerError,
        match=r"answered \(1, 3\) and scores \(1,\), its bundle declares \(1, 2\) and \(1,\)",
    ):
        load_model(make_settings())


def test_warm_up_refuses_probabilities_that_do_not_sum_to_one(
    certified: Path, make_settings: MakeSettings
) -> None:
    graph = classifier()
    graph.graph.node[-1].CopyFrom(log_of_mean().graph.node[-1])
    graph.graph.node[-1].input[0] = "logits"
    graph.graph.node[-1].output[0] = "probabilities"
    certify(certified / "certificate.json", write_bundle(certified / "bundle", graph))
    with pytest.raises(InvalidAnswerError, match=r"NaN or an infinity|do not sum to 1"):
        load_model(make_settings())


def test_model_refuses_to_return_a_non_finite_output(
    certified: Path, make_settings: MakeSettings
) -> None:
    certify(certified / "certificate.json", write_bundle(certified / "bundle", log_of_mean()))
    model = load_model(make_settings())
    value, score = np.array([1.5], dtype=np.float32), np.float32(0.5)
    assert model.answer(value, score) == {
        "value": 1.5,
        "interval": [1.25, 1.75],
        "ood_score": 0.5,
        "is_ood": False,
    }
    for broken in (np.nan, np.inf, -np.inf):
        with pytest.raises(InvalidAnswerError):
            model.answer(np.array([broken], dtype=np.float32), score)
        with pytest.raises(InvalidAnswerError):
            model.answer(value, np.float32(broken))


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
    """Control: in fp32 sets have labels from 0.25, and outliers begin at 0.75."""
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
            "the certificate says that onnxruntime/cpu/int8 differs: planted",
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


class CertifiedEngine:
    """An engine in `root`/engine with real files, run by ONNX Runtime because there is no GPU."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.bundle = root, load_bundle(root / "bundle")
        self.write(b"an engine")
        self.certify(files.sha256_file(root / "engine/engine_manifest.json"))
        monkeypatch.setattr(engine_runner, "open_engine", self._open)

    def write(self, plan: bytes) -> None:
        manifest = self.bundle.manifest
        engine_manifest = EngineManifest(
            format_version=2,
            engine_sha256=files.sha256_bytes(plan),
            model_sha256=manifest.models["fp32"].sha256,
            bundle_digest=self.bundle.digest,
            profile=Profile(smallest=1, optimal=1, largest=manifest.max_batch_size),
            workspace_mib=256,
            machine=MACHINE,
            requested=ENGINE_FP32,
            actual=ENGINE_FP32,
            precision_read_from="engine",
        )
        write_engine(self.root / "engine", plan, engine_manifest)

    def certify(self, engine_digest: str | None) -> None:
        engine_hop = hop().model_copy(
            update={"name": "tensorrt/fp32", "requested": ENGINE_FP32, "actual": ENGINE_FP32}
        )
        certify(
            self.root / "certificate.json",
            self.bundle,
            [hop(), engine_hop],
            engine_digest=engine_digest,
        )

    def _open(self, root: Path, bundle: LoadedBundle, certified: str | None = None) -> Runner:
        read_plan(root, read_engine_manifest(root, certified))
        runner = runtime.open_onnx(
            bundle.model_bytes("fp32"),
            variant="fp32",
            precision="fp32",
            provider="cpu",
            num_threads=1,
        )
        runner.actual = ENGINE_FP32
        return runner


@pytest.fixture
def engine(certified: Path, monkeypatch: pytest.MonkeyPatch) -> CertifiedEngine:
    return CertifiedEngine(certified, monkeypatch)


def test_the_certified_engine_is_served(
    engine: CertifiedEngine, make_settings: MakeSettings
) -> None:
    assert load_model(make_settings()).selection.actual == ENGINE_FP32


@pytest.mark.parametrize("provider", ["auto", "tensorrt"])
def test_engine_replaced_after_certification_is_refused_even_if_the_provider_is_auto(
    engine: CertifiedEngine, make_settings: MakeSettings, provider: str
) -> None:
    engine.write(b"another engine of the same graph")
    with pytest.raises(IntegrityError, match="is not the certified one"):
        load_model(make_settings(provider=provider))


def test_engine_with_a_flipped_bit_is_refused_even_if_the_provider_is_auto(
    engine: CertifiedEngine, certified: Path, make_settings: MakeSettings
) -> None:
    flip_a_byte(certified / "engine/engine.plan")
    with pytest.raises(IntegrityError, match="was altered"):
        load_model(make_settings())


def test_engine_that_the_certificate_does_not_cover_is_not_served(
    engine: CertifiedEngine, make_settings: MakeSettings
) -> None:
    engine.certify(None)
    with pytest.raises(UnavailableError, match="the certificate does not cover the engine"):
        load_model(make_settings(provider="tensorrt"))
    assert load_model(make_settings()).selection.actual.provider == "cpu"
