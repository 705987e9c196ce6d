import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipway.artifacts.bundle import load_bundle
from slipway.inputs.columns import Column, ColumnContract
from slipway.inputs.images import TransformContract
from slipway.inputs.user_function import code_digest, load
from slipway.predictor import loader
from slipway.predictor.model import InvalidAnswerError
from slipway.runtimes import runtime
from slipway.serving import settings as settings_module
from slipway.serving.models.loader import load_model
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
    log_of_mean,
    probabilities,
    row_classifier,
    row_probabilities,
    row_sum,
    write_bundle,
)
from tests.serving.conftest import MakeSettings
from tests.serving.models.damage import flip_a_byte
from tests.user_functions import WriteFunctions, _write_functions  # noqa: F401 - a fixture


def newer_format(root: Path) -> None:
    content = json.loads((root / "bundle/bundle.json").read_text())
    (root / "bundle/bundle.json").write_text(json.dumps(content | {"format_version": 9}))


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
        (newer_format, BundleError, "format version 9"),
        (older_format, BundleError, "format version 4, this Slipway reads version 8"),
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
