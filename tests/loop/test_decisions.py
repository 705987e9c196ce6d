"""A decision fits one request: every other one is refused with the reason."""

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from slipway.loop.decisions import (
    DecisionRequest,
    PersonDecision,
    check_decision,
    new_request,
    read_decision,
    signed,
)
from slipway.loop.journal import JOURNAL, Cycle, LoopError, append_step, cycles, read_journal
from slipway.system import files
from tests.loop.cases import DAY_S, comparison, write_steps

NOW = 1000.0


def request_of(**changes: Any) -> DecisionRequest:
    fields: dict[str, Any] = {
        "cycle": 1,
        "created": NOW,
        "expires": NOW + 7 * DAY_S,
        "reasons": ["drift"],
        "version": "aaaa",
        "bundle_digest": "aaaa0",
        "certificate_digest": "c",
        "data_digest": "d",
        "gates": "passed",
        "experiment": "loop-1-1",
        "replaces": "bbbb",
        "comparison": comparison((0.9, 0.7), (0.9, 0.9)),
        "why": "better",
    }
    return new_request(**fields | changes)


def requested(folder: Path, **changes: Any) -> Cycle:
    """Write a request in `folder`, and return the cycle that awaits a decision on it."""
    request = request_of(**changes)
    path = folder / "0001/request.json"
    files.write_text(path, files.canonical_json(request.model_dump(mode="json")))
    detail = {
        "path": "0001/request.json",
        "digest": files.sha256_file(path),
        "version": request.version,
        "expires": request.expires,
    }
    return write_steps(folder, {"triggered": {}, "requested": detail})


def decision_on(cycle: Cycle, **changes: Any) -> PersonDecision:
    fields: dict[str, Any] = {
        "format_version": 1,
        "request": cycle.detail("requested")["digest"],
        "version": "aaaa",
        "verdict": "approved",
        "by": "anna",
        "reason": "looks right",
        "time": NOW + 60,
    }
    return PersonDecision.model_validate(fields | changes)


def refusal(
    decision: PersonDecision, cycle: Cycle | None, folder: Path, now: float = NOW + 60, *keys: str
) -> str:
    with pytest.raises(LoopError) as error:
        check_decision(decision, cycle, folder, now, keys)
    return str(error.value)


def test_a_decision_on_the_requested_version_is_accepted(tmp_path: Path) -> None:
    cycle = requested(tmp_path)
    assert check_decision(decision_on(cycle), cycle, tmp_path, NOW + 60, []).version == "aaaa"


def test_a_replayed_decision_is_refused(tmp_path: Path) -> None:
    cycle = requested(tmp_path)
    decision = decision_on(cycle)
    append_step(tmp_path / JOURNAL, 1, "decided", decision.model_dump(mode="json"), NOW + 60)
    decided = cycles(read_journal(tmp_path / JOURNAL))[-1]
    assert "was approved by anna already" in refusal(decision, decided, tmp_path)
    append_step(tmp_path / JOURNAL, 1, "ended", {"outcome": "promoted"}, NOW + 90)
    ended = cycles(read_journal(tmp_path / JOURNAL))[-1]
    assert "it was used before" in refusal(decision, ended, tmp_path)
    assert "no decision is awaited" in refusal(decision, None, tmp_path)


def test_a_decision_of_another_cycle_or_service_is_refused(tmp_path: Path) -> None:
    """The other request is on the same candidate, with the same data and numbers."""
    cycle = requested(tmp_path / "own")
    foreign = requested(tmp_path / "other")
    found = refusal(decision_on(foreign), cycle, tmp_path / "own")
    assert "another request" in found
    assert "of another cycle or service" in found


def test_a_decision_on_another_version_is_refused(tmp_path: Path) -> None:
    cycle = requested(tmp_path)
    found = refusal(decision_on(cycle, version="cccc"), cycle, tmp_path)
    assert found.startswith("the decision is on cccc, expected aaaa")


def test_an_expired_decision_is_refused(tmp_path: Path) -> None:
    cycle = requested(tmp_path)
    late = NOW + 7 * DAY_S
    assert "expired at" in refusal(decision_on(cycle), cycle, tmp_path, late)
    assert "expired at" in refusal(decision_on(cycle, time=late), cycle, tmp_path)


@pytest.mark.parametrize("seconds", [-3600, 3600])
def test_a_decision_dated_before_the_request_or_in_the_future_is_refused(
    tmp_path: Path, seconds: float
) -> None:
    cycle = requested(tmp_path)
    found = refusal(decision_on(cycle, time=NOW + 60 + seconds), cycle, tmp_path)
    assert "Set the clocks" in found


def test_a_decision_on_a_request_file_that_was_changed_is_refused(tmp_path: Path) -> None:
    cycle = requested(tmp_path)
    path = tmp_path / "0001/request.json"
    path.write_text(path.read_text().replace('"gates": "passed"', '"gates": "missed"'))
    assert "was changed after it was written" in refusal(decision_on(cycle), cycle, tmp_path)


def key_pair(folder: Path, name: str) -> tuple[Path, Path]:
    """Make a pair as the message of an error says."""
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    for arguments in (
        ["ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(private)],
        ["ec", "-in", str(private), "-pubout", "-out", str(public)],
    ):
        subprocess.run(["openssl", *arguments], check=True, capture_output=True)
    return private, public


def test_with_approvers_a_decision_needs_the_signature_of_one_of_them(tmp_path: Path) -> None:
    cycle = requested(tmp_path)
    (anna, anna_public), (_, ben_public) = (key_pair(tmp_path, name) for name in ("anna", "ben"))
    decision = signed(decision_on(cycle), anna)
    files.write_text(tmp_path / "decision.json", decision.model_dump_json())
    both = (str(ben_public), str(anna_public))
    read = read_decision(tmp_path / "decision.json")
    assert check_decision(read, cycle, tmp_path, NOW + 60, both)
    unsigned = decision_on(cycle)
    assert "is not signed" in refusal(unsigned, cycle, tmp_path, NOW + 60, *both)
    only_ben = (str(ben_public),)
    assert "by no key of loop.approvers" in refusal(decision, cycle, tmp_path, NOW + 60, *only_ben)
    for change in ({"verdict": "rejected"}, {"by": "ben"}, {"reason": "another"}):
        changed = decision.model_copy(update=change)
        assert "by no key" in refusal(changed, cycle, tmp_path, NOW + 60, *both)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"revoked": "anna left"}, "was revoked: anna left. Expected a valid key"),
        ({"expires": "1970-01-01T00:17:00Z"}, "expired at 1970-01-01T00:17:00"),
        ({"expires": "1970-01-02T00:00:00Z"}, ""),
    ],
    ids=["revoked", "expired", "valid"],
)
def test_a_decision_signed_with_a_revoked_or_expired_key_is_refused(
    tmp_path: Path, entry: dict[str, str], message: str
) -> None:
    cycle = requested(tmp_path)
    private, public = key_pair(tmp_path, "anna")
    key = hashlib.sha256(public.read_bytes()).hexdigest()
    listed = tmp_path / "keys.json"
    listed.write_text(json.dumps({"format_version": 1, "keys": [{"sha256": key, **entry}]}))
    decision = signed(decision_on(cycle), private)
    arguments = (decision, cycle, tmp_path, NOW + 60, [str(public)], listed)
    if not message:
        assert check_decision(*arguments).version == "aaaa"
        return
    with pytest.raises(LoopError, match=message):
        check_decision(*arguments)


def test_error_for_a_file_that_holds_no_key_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_text("no key")
    cycle = requested(tmp_path)
    with pytest.raises(LoopError, match=r"cannot sign .* expected a private key"):
        signed(decision_on(cycle), tmp_path / "key.pem")
    private, _ = key_pair(tmp_path, "anna")
    decision = signed(decision_on(cycle), private)
    found = refusal(decision, cycle, tmp_path, NOW + 60, str(tmp_path / "key.pem"))
    assert "loop.approvers names" in found
