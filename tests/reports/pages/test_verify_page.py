"""The certificate's page: whole, escaped, self-contained, and it says what the certificate says."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from slipway.artifacts.bundle import Metric
from slipway.artifacts.certificate import Certificate, Execution, Hop, HopBounds
from slipway.export.certification.comparison import HopComparison, Tolerance, not_executed
from slipway.export.certification.measurement import BatchAnswers, Measurement, TestRows
from slipway.inputs.contract import InputContract
from slipway.kinds.registry import Task, kind_of
from slipway.metrics.scores import Resampling
from slipway.reports.pages.charts import LogBar, log_bars
from slipway.reports.pages.verify_page import HopAnswers, _flagged_rows, verify_page
from slipway.system.user_code import UserCode
from tests.reports.test_pages import CONTRACT, EVIL, FOREIGN, faults
from tests.serving.bundles import COLUMNS, gate

CLASSES = ["ape", EVIL, "cow"]
NUM_ROWS = 40
TORCH = Execution(backend="torch", provider="cpu", precision="fp32", variant="weights")
CPU = Execution(backend="onnxruntime", provider="cpu", precision="fp32", variant="fp32")
INT8 = Execution(backend="onnxruntime", provider="cpu", precision="int8", variant="int8")
AUTO = Execution(backend="http", provider="auto", precision="auto", variant="auto")


def make_page(
    task: Task,
    contract: InputContract,
    inputs: NDArray[Any],
    *,
    num_flipped: int = 20,
    breaks: bool = False,
) -> tuple[str, list[Hop]]:
    """Torch, fp32 with a rounding error, int8 with `num_flipped` flips, no engine, and HTTP.

    `breaks`: fp32 answers NaN to row 7.
    """
    classes = CLASSES if task.endswith("classification") else []
    generator = np.random.default_rng(0)
    raw = generator.random((NUM_ROWS, 3)) if classes else generator.random((NUM_ROWS, 1))
    right = (raw / raw.sum(axis=1, keepdims=True) if classes else raw).astype(np.float32)
    near = right.copy()
    near[5] += np.array([1e-7, -1e-7, 0] if classes else [1e-7], dtype=np.float32)
    if breaks:
        near[7] = np.nan
    turned = right.copy()
    turned[:num_flipped] = turned[:num_flipped, ::-1]
    targets = right.argmax(axis=1).astype(np.float64) if classes else raw[:, 0]
    names = [f"id{row}" for row in range(NUM_ROWS)]
    rows = TestRows(
        task, classes, names, [f"{EVIL}{row}" for row in range(NUM_ROWS)], inputs, targets
    )
    judge = HopComparison(rows, Resampling(0, 50, 0.95))
    torch = measurement(TORCH, right)
    first = judge.first("torch", TORCH, torch)
    fp32 = measurement(CPU, near, BatchAnswers(7, near[:9]))
    int8 = measurement(INT8, turned if classes else right)
    hops = [
        first,
        judge.against(
            "onnxruntime/cpu/fp32", CPU, fp32, (first, torch), Tolerance(max_difference=1e-5)
        ),
        judge.against(
            "onnxruntime/cpu/int8", INT8, int8, (first, torch), Tolerance(max_metric_loss=1.0)
        ),
        not_executed(f"tensorrt/{EVIL}", INT8, f"no GPU {EVIL}"),
    ]
    answers = {"torch": right, "onnxruntime/cpu/fp32": near, "onnxruntime/cpu/int8": int8.outputs}
    if not breaks:
        http = measurement(CPU.model_copy(update={"backend": "http"}), near)
        hops.append(
            judge.against("http", AUTO, http, (hops[1], fp32), Tolerance(max_difference=1e-5))
        )
        answers["http"] = near
    certificate = Certificate(
        format_version=5,
        gates="missed",
        gate_results=[gate(), gate(0.5, name=EVIL), gate(None, name="roc_auc")],
        status="refused" if breaks else "certified",
        metric=kind_of(task).target.headline,
        bundle_digest="0" * 64,
        engine_digest=None,
        digests={EVIL: "1" * 64},
        user_code=[UserCode(key="train.loss", name=EVIL, sha256="2" * 64)],
        training=[f"fsdp on 2 processes {EVIL}", "ddp on 4 processes with 8 rows a batch"],
        hops=hops,
        hardware={"cpu": EVIL},
        versions={"python": EVIL},
    )
    shown = HopAnswers(task, classes, names, rows.sources, targets, inputs, answers)
    return verify_page(certificate, shown, contract), hops


def measurement(
    actual: Execution, outputs: NDArray[np.float32], *smaller: BatchAnswers
) -> Measurement:
    return Measurement(
        actual,
        outputs,
        latency_ms=0.5,
        rows_per_second=1000.0,
        batches=(*smaller, BatchAnswers(32, outputs)),
    )


def pictures() -> NDArray[np.uint8]:
    return np.random.default_rng(1).integers(
        0, 256, size=(NUM_ROWS, *CONTRACT.shape), dtype=np.uint8
    )


def encoded_rows() -> NDArray[np.float32]:
    return np.tile(
        np.array([0.5] * 4 + [0] * (COLUMNS.shape[0] - 6) + [1, 2], dtype=np.float32), (NUM_ROWS, 1)
    )


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize(
    "task", ["image_classification", "image_regression", "table_classification"]
)
def test_the_verify_page_is_valid_escaped_and_loads_nothing(task: Task, breaks: bool) -> None:
    is_table = task.startswith("table")
    document, hops = make_page(
        task,
        COLUMNS if is_table else CONTRACT,
        encoded_rows() if is_table else pictures(),
        breaks=breaks,
    )
    assert not FOREIGN.search(document)
    assert faults(document) == []
    for hop in hops:
        assert hop.name.replace(EVIL, "") in document
    assert "no GPU" in document
    assert "fsdp on 2 processes" in document
    assert "ddp on 4 processes with 8 rows a batch" in document
    assert ("The first bad hop is onnxruntime/cpu/fp32" in document) == breaks
    assert ("Worst row: id7." in document) == breaks


def test_the_verify_page_shows_flipped_rows_with_both_answers_and_counts_all() -> None:
    document, hops = make_page("image_classification", CONTRACT, pictures())
    int8 = next(hop for hop in hops if hop.name.endswith("int8"))
    num_flipped = len(int8.flipped)
    assert num_flipped > 12
    assert (
        f"{num_flipped} of {NUM_ROWS} rows: {num_flipped} had the right label with torch, "
        "0 have it here, 0 neither way." in document
    )
    assert "12 are shown, the certificate has every id." in document
    assert (
        document.count("<figure>") == 12 + 2
    )  # and the worst row of fp32 and of int8; HTTP answers as fp32
    assert "ape → cow" in document
    assert "Labels that flip: onnxruntime/cpu/int8" in document


def test_the_verify_page_shows_the_cells_of_flipped_table_rows() -> None:
    document, _ = make_page("table_classification", COLUMNS, encoded_rows(), num_flipped=1)
    assert "<figure>" not in document
    for text in ("<th>colour</th>", "<td>red</td>", "Zürich"):
        assert text in document


def test_the_verify_page_says_if_no_label_flips() -> None:
    document, _ = make_page("image_classification", CONTRACT, pictures(), num_flipped=0)
    assert "None: every hop gives every row the label of the trained network." in document


def test_the_verify_page_shows_flagged_rows_with_the_allowed_fraction() -> None:
    document, hops = make_page("image_classification", CONTRACT, pictures())
    assert "<h2>Out of distribution</h2>" not in document  # nothing counted them
    share = Metric(value=0.61, low=0.512, high=0.7, confidence=0.95, rows=NUM_ROWS)
    allowed = HopBounds(
        max_difference=None, max_score_difference=None, max_metric_loss=0.1, max_ood_fraction=0.162
    )
    section = _flagged_rows(
        [
            hops[0],
            hops[1].model_copy(
                update={"ood_fraction": share, "allowed": allowed, "score_rank": 0.27}
            ),
        ]
    )
    for text in ("61.0%", "51.2% to 70.0%", "16.2%", "0.2700"):
        assert f">{text}</td>" in section


def test_the_verify_page_names_batch_sizes_without_time_for_all_rows() -> None:
    document, _ = make_page("image_classification", CONTRACT, pictures())
    assert f"9 of {NUM_ROWS}" in document
    assert "verify.batch_seconds left no time for all rows" in document


def test_log_bars_are_placed_between_powers_of_ten() -> None:
    bars = log_bars(
        [
            LogBar("a", 1e-7, "1e-07", limit=1e-5),
            LogBar("b", 1e-3, "0.001", is_bad=True),
            LogBar("c", 0.0, "0"),
        ],
        "x",
        "Mark.",
    )
    assert "from 1e-08 to 0.0100" in bars
    assert '<i style="width:16.7%">' in bars
    assert '<i class="bad" style="width:83.3%">' in bars
    assert "left:50.0%" in bars
    assert bars.count("<i") == 2
    assert bars.endswith("Mark.</p>")


def test_log_bars_without_values_have_no_scale() -> None:
    assert "x: 0 everywhere." in log_bars([LogBar("a", 0.0, "0"), LogBar("b", None, "none")], "x")
