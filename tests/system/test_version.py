"""Records that another version of Slipway wrote are recognised by their versions."""

from slipway.system.version import DISTRIBUTION, installed_version, other_version


def test_other_version_returns_a_different_version_in_a_record() -> None:
    assert other_version({DISTRIBUTION: "0.0.9"}) == "0.0.9"


def test_other_version_is_empty_for_the_same_or_a_missing_version() -> None:
    assert other_version({DISTRIBUTION: installed_version()}) == ""
    assert other_version({"torch": "2.0"}) == ""
    assert other_version({DISTRIBUTION: "unknown"}) == ""
