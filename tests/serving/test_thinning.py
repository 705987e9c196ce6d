"""Under a load that it has no time for, the watching counts most requests, and takes few in whole."""

import re
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from prometheus_client import generate_latest

from serving.metrics.service_metrics import ServiceMetrics
from serving.models.model import AnsweredRow, ServedModel
from serving.models.observers import Answered
from serving.monitoring import watcher as watching
from serving.monitoring.budget import Allowance
from serving.monitoring.metrics import WatchingMetrics
from serving.monitoring.sampling import RunningCounts, SampledCounts, Thinning
from serving.monitoring.watcher import Watcher
from serving.requests.payload import Payload
from slipway.artifacts.bundle import load_bundle
from tests.serving.conftest import MakeSettings
from tests.serving.watched import pixels
from tests.traffic.test_request_log import EXECUTION

pytestmark = pytest.mark.usefixtures("quick_watching")


def answered(certified: Path, number: int) -> Answered:
    """A request that was answered."""
    # Watching looks at the bundle of a model, and at how it ran.
    model = cast(
        ServedModel,
        SimpleNamespace(
            bundle=load_bundle(certified / "bundle"), selection=SimpleNamespace(actual=EXECUTION)
        ),
    )
    row = pixels(number, 1)
    answers = [
        {
            "label": "grey",
            "probabilities": {"dark": 0.2, "grey": 0.5, "bright": 0.3},
            "is_outlier": False,
        }
    ]
    rows = [
        AnsweredRow(
            np.array([0.2, 0.5, 0.3], np.float32), np.float32(0.4), answers[0], ("grey", 0.5, False)
        )
    ]
    return Answered(f"id-{number}", Payload("images", (b"",)), False, row, model, rows, answers)


@pytest.mark.process
def test_the_processor_time_is_bounded_by_thinning_out(
    certified: Path, make_watched: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "FEATURES_SHARE", 1e-6)
    monkeypatch.setattr(watching, "_BURST_S", 1e-3)
    settings, service_metrics = make_watched(), ServiceMetrics()
    registry = service_metrics.registry
    metrics = WatchingMetrics(service_metrics)
    one = Watcher(settings, metrics, lambda: None, lambda version: None)
    one.start()
    for begin in range(0, 2000, 500):
        for number in range(begin, begin + 500):
            one.offer([answered(certified, 0)._replace(request_id=f"id-{number}")], 0.0)
        time.sleep(0.1)
    one.close()
    counted = dict(
        re.findall(
            r'slipway_watched_rows_total{outcome="(\w+)"} (\S+)', generate_latest(registry).decode()
        )
    )
    assert float(counted["watched"]) + float(counted["thinned"]) == 2000
    assert float(counted["thinned"]) >= 1000
    assert (
        'slipway_classes_total{label="grey"} 2000.0' in generate_latest(registry).decode()
    )  # counting goes on


def test_running_counts_are_read_while_they_grow_and_nothing_is_counted_twice_or_lost(
    certified: Path,
) -> None:
    one = answered(certified, 0)
    others = one._replace(rows=[one.rows[0]._replace(counted=("dark", 1.0, True))] * 2)
    running, found = RunningCounts(one.bundle, "fp32"), SampledCounts(one.bundle, "fp32")
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            running.move_to(found)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(20_000):
        running.add([one])
        running.add([others, others])
    ended.set()
    reader.join()
    running.move_to(found)
    assert found.num_rows == 100_000
    assert found.labels == {"grey": 20_000, "dark": 80_000}
    assert found.num_outliers == 80_000
    assert sum(found.confidences) == 100_000
    assert found.confidence_sum == pytest.approx(20_000 * 0.5 + 80_000)
    assert not running.is_new


def test_counts_of_a_model_that_is_served_no_more_are_forgotten_and_its_last_row_is_not(
    certified: Path, make_watched: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    service_metrics = ServiceMetrics()
    registry = service_metrics.registry
    one = Watcher(
        make_watched(), WatchingMetrics(service_metrics), lambda: None, lambda version: None
    )
    # Its thread is not started: what it would do is done here, step by step.
    monkeypatch.setattr(one._thinning, "divide", lambda requests: ((), requests))
    one.offer([answered(certified, 0)], 0.0)
    (running,) = one._counted.values()
    one._forget_counts()
    assert one._counted  # there were rows since it was last looked at
    one._forget_counts()
    assert not one._counted
    running.add([answered(certified, 0)])  # by who had it in hand then
    for group in one._gather():
        one._count(group)
    assert 'slipway_classes_total{label="grey"} 2.0' in generate_latest(registry).decode()
    assert not one._gather()


def num_whole(thinning: Thinning, num_requests: int) -> int:
    """How many are taken in whole of so many, which come in turns of 1 to 40; none is lost, or given twice."""
    turns = np.split(
        np.arange(num_requests), np.cumsum(np.random.default_rng(3).integers(1, 41, num_requests))
    )
    total = 0
    for turn in turns:
        whole, others = thinning.divide(turn.tolist())
        assert sorted([*whole, *others]) == turn.tolist()
        total += len(whole)
    return total


@pytest.mark.process
def test_most_of_a_load_that_would_be_thinned_out_is_only_counted_and_all_is_taken_again_without_it() -> (
    None
):
    thinning = Thinning()
    for _ in range(5):
        thinning.adapt(10_000, 10_000)
        assert num_whole(thinning, 100) == 100
    thinning.adapt(10_000, 1000)  # there was time for a tenth
    assert 1200 < num_whole(thinning, 10_000) < 1800
    num_rounds = 0
    while num_whole(thinning, 1000) < 1000:
        thinning.adapt(300, num_whole(thinning, 300))  # there is time for all that is taken
        num_rounds += 1
    assert 2 <= num_rounds < 20
    thinning.adapt(10**6, 0)
    assert num_whole(thinning, 10**6) > 0  # it never ends altogether
    thinning.adapt(0, 0)
    assert num_whole(thinning, 100) == 100


def test_each_request_is_taken_in_whole_as_often_as_any_other() -> None:
    thinning, taken = Thinning(), Counter[int]()
    for _ in range(4000):
        thinning.adapt(1000, 200)  # time for a fifth, of which half as many again are taken: 30 %
        for begin in (0, 7):
            taken.update(thinning.divide(range(begin, begin + 7))[0])
    assert set(taken) == set(range(14))
    assert all(
        1200 - 5 * 29 < count < 1200 + 5 * 29 for count in taken.values()
    )  # five standard deviations of 4,000 drawn at 0.3


def test_an_allowance_is_spent_overdrawn_by_one_piece_and_comes_back_with_time() -> None:
    now, spent = [0.0], [0.0]
    allowance = Allowance(0.01, 0.5, clock=lambda: now[0], spent=lambda: spent[0])
    for _ in range(2):
        assert allowance.is_left()
        with allowance.spending():
            spent[0] += 0.4
    assert not allowance.is_left()
    now[0] += 29  # 0.29 s of processor time, and 0.3 are owed
    assert not allowance.is_left()
    now[0] += 2
    assert allowance.is_left()
    now[0] += 1e6
    with allowance.spending():
        assert allowance.is_left()
        spent[0] += 0.51  # no more than the burst was there
    assert not allowance.is_left()
