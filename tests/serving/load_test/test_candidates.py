"""The settings that the tuner tries are few, distinct and possible."""

from slipway.serving.load_test.candidates import (
    SettingsCandidate,
    batches,
    present_candidate,
    sharings,
)
from tests.serving.conftest import MakeSettings
from tests.serving.load_test.tuned import PRESENT


def test_candidates_are_few_distinct_and_within_cores_and_bundle() -> None:
    for cores in (1, 2, 4, 16, 64):
        found = sharings(PRESENT, cores)
        assert found[0] == PRESENT
        assert len(found) == len(set(found)) <= 6
        assert all(other.workers * other.num_threads <= max(cores, 2) for other in found)
    assert {other.max_batch_size for other in batches(PRESENT, 64)} == {1, 8, 64}
    assert batches(SettingsCandidate(1, 1, 1), 1) == []


def test_present_settings_are_the_first_candidate(make_settings: MakeSettings) -> None:
    assert present_candidate(make_settings(workers=2, num_threads=3), 64) == SettingsCandidate(
        2, 3, 32
    )
    assert present_candidate(make_settings(num_threads=1), 16) == SettingsCandidate(1, 1, 16)
    assert present_candidate(
        make_settings(num_threads=1, max_batch_size=4), 16
    ) == SettingsCandidate(1, 1, 4)
