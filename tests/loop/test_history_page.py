"""The pages of the history and of a request: what they show, and that no text becomes markup."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipway.loop.decision_page import decision_page
from slipway.loop.history import main
from slipway.loop.history_page import served_periods
from slipway.loop.journal import FOLDER, JOURNAL, append_step
from slipway.serving.rollout.history import change_rollout
from slipway.serving.rollout.records.entries import HISTORY, Entry, Served
from slipway.serving.rollout.state import Rollout
from slipway.system import files
from slipway.traffic.monitoring_records import JudgedWindow
from tests.loop.cases import comparison, write_steps
from tests.loop.test_decisions import request_of

NOW = 1_790_000_000.0
CANDIDATE = "3f6c0a91b2d4"


def write_request(place: Path, **changes: Any) -> Path:
    fields = {"version": CANDIDATE, "created": NOW, "expires": NOW + 7 * 86400}
    request = request_of(**fields | changes)
    files.write_text(place / "request.json", files.canonical_json(request.model_dump(mode="json")))
    return place


def event(what: Any, reason: str, by: str = "") -> Callable[[Rollout], Rollout]:
    return lambda rollout: rollout.with_event(what, CANDIDATE, reason, by)


def test_page_of_a_request_shows_both_comparisons_and_the_exact_commands(tmp_path: Path) -> None:
    windows = [JudgedWindow("bbbb/fp32", NOW - 60, NOW, frozenset({"brightness"}))]
    found = decision_page(write_request(tmp_path), windows)
    for part in (
        f"slipway loop approve {CANDIDATE} --by NAME --reason TEXT",
        f"slipway loop reject {CANDIDATE} --by NAME --reason TEXT",
        "--sign KEY.pem --request request.json --out decision.json",
        files.sha256_file(tmp_path / "request.json"),
        "brightness",
        "old test rows",
        "recent rows without key a",
    ):
        assert part in found
    for active in ("<script", "<form", "<button", "http"):
        assert active not in found


def test_interval_of_a_loss_is_drawn_as_bad(tmp_path: Path) -> None:
    better = request_of(comparison=comparison((0.9, 0.7), (0.9, 0.9)))
    worse = request_of(comparison=comparison((0.9, 0.9), (0.9, 0.7)))
    for request, is_bad in ((better, False), (worse, True)):
        write_request(tmp_path, comparison=request.comparison)
        assert ('class="range bad"' in decision_page(tmp_path, [])) == is_bad


def test_certificate_that_was_changed_after_the_request_is_named(tmp_path: Path) -> None:
    (write_request(tmp_path) / "certificate.json").write_text("{}")
    assert "The certificate was changed after the request" in decision_page(tmp_path, [])


def test_page_of_the_history_shows_who_decided_and_escapes_every_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLIPWAY_STATE", str(tmp_path))
    change_rollout(tmp_path, event("proposed", "<script>alert(1)</script>", "ann & ben"))
    folder, now = tmp_path / FOLDER, time.time()
    place = write_request(folder / "0001", created=now, expires=now + 60)
    detail = {
        "path": "0001/request.json",
        "digest": files.sha256_file(place / "request.json"),
        "expires": now + 60,
    }
    triggered = {"reasons": ["500 new labels"], "served": "bbbb", "since": 0.0}
    write_steps(folder, {"triggered": triggered, "requested": detail})
    out = tmp_path / "history.html"
    main(["--html", str(out)])
    found = out.read_text()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in found
    assert "<script" not in found
    assert "ann &amp; ben" in found
    assert "A decision is awaited" in found
    decided = {"verdict": "rejected", "by": "eva", "reason": "odd", "signature": None}
    append_step(folder / JOURNAL, 1, "decided", decided, now)
    main(["--html", str(out)])
    found = out.read_text()
    assert "rejected by eva (not signed): odd" in found
    assert "A decision is awaited" not in found
    assert f"wrote {out}" in capsys.readouterr().out


@pytest.mark.parametrize("damaged", [HISTORY, f"{FOLDER}/{JOURNAL}"])
def test_no_page_is_written_from_a_history_with_a_broken_chain(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    damaged: str,
) -> None:
    monkeypatch.setenv("SLIPWAY_STATE", str(tmp_path))
    for reason in ("first", "second"):
        change_rollout(tmp_path, event("refused", reason))
    write_steps(tmp_path / FOLDER, {"triggered": {"reasons": ["first"]}, "collected": {}})
    path = tmp_path / damaged
    path.write_bytes(path.read_bytes().replace(b"first", b"other", 1))
    with pytest.raises(SystemExit):
        main(["--html", str(tmp_path / "history.html")])
    assert "changed or damaged: line 2" in capsys.readouterr().err
    assert not (tmp_path / "history.html").exists()


def test_each_served_period_has_its_proposal_and_its_end() -> None:
    def entry(number: int, what: Any, model: str, stable: str | None, by: str = "") -> Entry:
        served = Served(version=stable) if stable else None
        return Entry(
            format_version=2,
            number=number,
            event=number,
            time=float(number),
            what=what,
            model=model,
            by=by,
            reason="because",
            stable=served,
            candidate=None,
            fraction=0.0,
            previous="",
        )

    first, second, third = served_periods(
        [
            entry(1, "started", "a", "a"),
            entry(2, "proposed", "b", "a", "ann"),
            entry(3, "swapped", "b", "b"),
            entry(4, "proposed", "SLIPWAY_BUNDLE", "b", "ben"),
            entry(5, "swapped", "SLIPWAY_BUNDLE", None),
            entry(6, "started", "a", "a"),
        ]
    )
    assert (first.served.version, first.end, first.proposed) == ("a", 3.0, None)
    assert second.proposed is not None
    assert (second.served.version, second.end, second.proposed.by) == ("b", 5.0, "ann")
    assert third.proposed is not None
    assert (third.served.version, third.end, third.proposed.by) == ("a", None, "ben")
