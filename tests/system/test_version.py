"""Records that another version of Slipway wrote are recognised."""

from slipway.system.version import DISTRIBUTION, installed_version, other_version


def test_another_version_in_a_record_is_named() -> None:
    assert other_version({DISTRIBUTION: "0.0.9"}) == "0.0.9"


def test_the_same_version_and_records_without_one_are_no_other() -> None:
    assert other_version({DISTRIBUTION: installed_version()}) == ""
    assert other_version({"torch": "2.0"}) == ""
    assert other_version({DISTRIBUTION: "unknown"}) == ""
