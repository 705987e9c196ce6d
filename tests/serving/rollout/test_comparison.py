"""A model that may not succeed the stable one is refused, with the reason."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipway.artifacts.bundle import (
    Metric,
    OutputContract,
    describe_model,
    load_bundle,
    write_manifest,
)
from slipway.inputs.columns import ColumnContract
from slipway.serving.rollout.comparison import explained_disagreement, require_successor
from slipway.serving.rollout.state import Allowed, RolloutError
from slipway.serving.worker import ModelWorker
from slipway.system.errors import SlipwayError
from tests.serving.bundles import (
    COLUMNS,
    LABELS,
    TEXTS,
    certify,
    column,
    row_classifier,
    text_classifier,
    with_golden_rows,
    write_bundle,
)
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import metric
from tests.serving.rolling import (
    PICTURES,
    failing_classifier,
    last_event,
    low_accuracy,
    propose,
    run,
    scaled_classifier,
    settle,
    write_candidate,
)


def truncate(bundle: Path) -> None:
    model = bundle / "model_fp32.onnx"
    model.write_bytes(model.read_bytes()[:-100])


def flip_a_byte(bundle: Path) -> None:
    model = bundle / "model_fp32.onnx"
    payload = bytearray(model.read_bytes())
    payload[len(payload) // 2] ^= 1
    model.write_bytes(payload)


def foreign_certificate(bundle: Path) -> None:
    certify(
        bundle.parent / "certificate.json",
        write_bundle(bundle.parent / "other", scaled_classifier(7)),
    )


def not_onnx(bundle: Path) -> None:
    """Make the model of a bundle unloadable, and correct its digests."""
    (bundle / "model_fp32.onnx").write_bytes(b"no model")
    manifest = load_bundle(bundle).manifest
    described = describe_model(bundle / "model_fp32.onnx", "fp32", ["cpu"])
    write_manifest(bundle, manifest.model_copy(update={"models": {"fp32": described}}))
    certify(bundle.parent / "certificate.json", load_bundle(bundle))


def canary_of_another(bundle: Path) -> None:
    """Replace the golden rows of a bundle by those of other weights."""
    certify(bundle.parent / "certificate.json", with_golden_rows(load_bundle(bundle)))


def nan_on_its_canary(bundle: Path) -> None:
    certify(
        bundle.parent / "certificate.json",
        with_golden_rows(write_bundle(bundle, failing_classifier(100))),
    )


@pytest.mark.process
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (truncate, "was altered: its SHA-256"),
        (flip_a_byte, "was altered: its SHA-256"),
        (foreign_certificate, "the certificate is for bundle"),
        (not_onnx, "in the bundle|cannot be|protobuf|load"),
        (canary_of_another, "were not answered as fp32 answers them"),
        (nan_on_its_canary, "NaN or an infinity"),
    ],
)
def test_a_bad_model_is_refused_and_the_stable_one_continues_to_serve(
    certified: Path, make_settings: MakeSettings, spoil: Callable[[Path], None], reason: str
) -> None:
    settings = make_settings(max_batch_size=1)
    stable = load_bundle(settings.bundle).version
    bundle = write_candidate(certified / "new", scaled_classifier(-2))
    spoil(bundle)

    async def work(client: Any, worker: ModelWorker) -> None:
        with pytest.raises(SlipwayError, match=reason):
            await propose(worker, "deploy", bundle)
        await settle(worker, lambda: metric(worker, 'slipway_swaps_total{outcome="refused"}') == 1)
        assert (await client.post("/predict", content=PICTURES[0])).json()[
            "model_version"
        ] == stable
        shown = (await client.get("/rollout")).json()
        assert shown["events"][-1]["what"] == "refused"
        assert shown["candidate"] is None
        assert [worker["serving"] for worker in shown["workers"]] == [stable]
        assert not list((settings.state / "models").glob("*"))

    run(settings, work)


def with_labels(*labels: str) -> dict[str, Any]:
    return {"output": OutputContract(kind="probabilities", labels=list(labels))}


@pytest.mark.process
@pytest.mark.usefixtures("unrehearsed")
@pytest.mark.parametrize(
    ("changes", "reason", "allowed"),
    [
        (
            low_accuracy(0.88),
            "its accuracy is 0.88, the stable model's 0.9: a loss of 0.02",
            Allowed(metric_loss=0.03),
        ),
        ({"metrics": {}}, "its bundle has no accuracy", Allowed(metric_loss=None)),
        (
            with_labels("dark", "grey", "red"),
            "other labels: without 'bright' and with 'red'",
            Allowed(other_contract=True),
        ),
        (with_labels(*LABELS[::-1]), "another order", Allowed(other_contract=True)),
    ],
)
def test_a_worse_model_or_another_signature_is_refused_unless_allowed(
    certified: Path,
    make_settings: MakeSettings,
    changes: dict[str, Any],
    reason: str,
    allowed: Allowed,
) -> None:
    settings = make_settings()
    stable = load_bundle(settings.bundle).version
    bundle = write_candidate(certified / "new", scaled_classifier(2), **changes)

    async def work(client: Any, worker: ModelWorker) -> None:
        await propose(worker, "deploy", bundle)
        await settle(worker, lambda: metric(worker, 'slipway_swaps_total{outcome="refused"}') == 1)
        assert reason in last_event(worker)[1]
        assert (await client.post("/predict", content=PICTURES[0])).json()[
            "model_version"
        ] == stable
        await propose(worker, "deploy", bundle, allowed=allowed)
        await settle(worker, lambda: worker.model is not None and worker.model.version != stable)

    run(settings, work)


def test_a_successor_may_standardise_differently_but_must_accept_the_same_columns(
    tmp_path: Path,
) -> None:
    stable = write_bundle(tmp_path, row_classifier()).manifest
    assert isinstance(stable.input, ColumnContract)

    def with_columns(*columns: Any) -> Any:
        return stable.model_copy(
            update={"input": COLUMNS.model_copy(update={"columns": list(columns)})}
        )

    same = COLUMNS.columns
    retrained = [
        one.model_copy(update={"mean": one.mean + 1, "std": one.std * 2, "fill": one.fill})
        for one in same
    ]
    require_successor(
        with_columns(*retrained, column("height", has_missing=True)), stable, Allowed()
    )
    wider = same[2].model_copy(update={"categories": ["red", "green", "blue", "white"]})
    require_successor(with_columns(*same[:2], wider, *same[3:]), stable, Allowed())
    for columns, reason in [
        (same[1:], "it has no column 'age'"),
        ([*same, column("height", required=True)], "it requires a new column 'height'"),
        ([column("age", "boolean"), *same[1:]], "column 'age' is a boolean, expected a number"),
        (
            [same[0].model_copy(update={"max": 100.0}), *same[1:]],
            "column 'age' accepts 0.0 to 100.0, expected 0.0 to 120.0",
        ),
        (
            [*same[:2], same[2].model_copy(update={"categories": ["red"]}), *same[3:]],
            "lacks 2 of the categories, such as 'green'",
        ),
        (
            [same[0], same[1].model_copy(update={"required": True}), *same[2:]],
            "column 'income' became required",
        ),
    ]:
        with pytest.raises(RolloutError, match=reason):
            require_successor(with_columns(*columns), stable, Allowed())
        require_successor(with_columns(*columns), stable, Allowed(other_contract=True))
    with pytest.raises(RolloutError, match="a running service cannot change that"):
        require_successor(
            write_bundle(tmp_path / "images").manifest, stable, Allowed(other_contract=True)
        )


def test_a_successor_must_ignore_the_columns_that_the_stable_model_ignores(tmp_path: Path) -> None:
    def ignoring(*names: str, columns: Any = COLUMNS.columns) -> Any:
        contract = COLUMNS.model_copy(update={"ignored": list(names), "columns": columns})
        return write_bundle(tmp_path, row_classifier()).manifest.model_copy(
            update={"input": contract}
        )

    require_successor(ignoring("id", "note"), ignoring("id"), Allowed())
    require_successor(ignoring("id", "age", columns=COLUMNS.columns[1:]), ignoring("id"), Allowed())
    with pytest.raises(
        RolloutError, match="it refuses the column 'id', which the stable model ignores"
    ):
        require_successor(ignoring(), ignoring("id"), Allowed())
    with pytest.raises(
        RolloutError, match="it reads the column 'id', which the stable model ignores"
    ):
        require_successor(
            ignoring(columns=[*COLUMNS.columns, column("id", has_missing=True)]),
            ignoring("id"),
            Allowed(),
        )


def test_a_successor_of_texts_may_read_more_of_a_text_but_must_accept_the_same_rows(
    tmp_path: Path,
) -> None:
    def of_texts(**changes: Any) -> Any:
        contract = TEXTS.model_copy(update={"ignored": ["id"], "masked": ["email"]} | changes)
        return write_bundle(tmp_path, text_classifier()).manifest.model_copy(
            update={"input": contract}
        )

    stable = of_texts()
    accepted: list[dict[str, Any]] = [
        {"ignored": ["id", "slipway_collected"]},
        {"max_bytes": 128, "max_characters": 2000},
        {"max_characters": None, "masked": ["email", "phone"]},
        {"columns": ["text", "title"]},
    ]
    for change in accepted:
        require_successor(of_texts(**change), stable, Allowed())
    refused: list[tuple[dict[str, Any], str]] = [
        ({"columns": ["title"]}, "it does not read the column 'text'"),
        ({"columns": ["text", "id"], "ignored": []}, "it reads the column 'id', which the stable"),
        ({"ignored": []}, "it refuses the column 'id', which the stable model ignores"),
        ({"max_characters": 999}, "it accepts 999 characters, expected 1000"),
        ({"masked": ["phone"]}, "it does not mask email, which the stable model masks"),
    ]
    for change, reason in refused:
        with pytest.raises(RolloutError, match=reason):
            require_successor(of_texts(**change), stable, Allowed())


def test_regression_models_are_compared_by_the_growth_of_the_rmse(tmp_path: Path) -> None:
    def with_rmse(value: float) -> Any:
        bundle = write_bundle(tmp_path).manifest
        rmse = {"rmse": Metric(value=value, low=value, high=value, confidence=0.95, rows=100)}
        return bundle.model_copy(update={"task": "image_regression", "metrics": rmse})

    require_successor(with_rmse(2.02), with_rmse(2.0), Allowed())
    with pytest.raises(
        RolloutError, match=r"its rmse is 2\.1, the stable model's 2: a loss of 0\.05"
    ):
        require_successor(with_rmse(2.1), with_rmse(2.0), Allowed())
    assert explained_disagreement(with_rmse(2.0), with_rmse(2.0)) == 0.1


def test_explained_disagreement_is_the_sum_of_both_models_error_rates(tmp_path: Path) -> None:
    good, better = (write_bundle(tmp_path, **low_accuracy(value)).manifest for value in (0.9, 0.95))
    assert explained_disagreement(better, good) == pytest.approx(0.15)
    assert (
        explained_disagreement(*[write_bundle(tmp_path, **low_accuracy(0.3)).manifest] * 2) == 0.5
    )
