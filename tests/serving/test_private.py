"""Files with callers' data are private under any umask; an operator's folder keeps its mode."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from slipway.serving.monitoring.labels import Prediction
from slipway.serving.monitoring.proposals import write_proposal
from slipway.serving.monitoring.settings import Limits
from slipway.serving.monitoring.store import Part, Store
from slipway.serving.rollout.history import change_rollout
from slipway.serving.rollout.state import FILE
from slipway.serving.rollout.store import command_lock
from slipway.serving.worker import ModelWorker
from slipway.traffic.monitoring_records import DATABASE
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import reconciler_of, run


@pytest.fixture(autouse=True, params=[0o022, 0o000])
def _umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("monitoring", [True, False])
def test_the_service_creates_a_state_folder_only_for_its_owner(
    make_settings: MakeSettings, monitoring: bool
) -> None:
    settings = make_settings(monitoring=monitoring)

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        assert mode(settings.state) == 0o700
        await reconciler_of(worker).reconcile()
        assert (settings.state / "rollout.d").is_dir()

    run(settings, work)
    assert mode(settings.state) == 0o700


def test_an_existing_state_folder_keeps_its_mode(make_settings: MakeSettings) -> None:
    settings = make_settings()
    settings.state.mkdir()
    settings.state.chmod(0o750)

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        await reconciler_of(worker).reconcile()

    run(settings, work)
    assert mode(settings.state) == 0o750


def test_an_uncreatable_state_folder_does_not_end_the_service(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    settings = make_settings(state=tmp_path / "file" / "state")

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        assert worker.require_model()

    run(settings, work)


def test_the_service_of_the_verify_stage_creates_no_state(make_settings: MakeSettings) -> None:
    settings = make_settings(accept_draft=True)

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        assert not settings.state.exists()

    run(settings, work)


def test_rollout_command_before_the_first_start_creates_the_same_state(tmp_path: Path) -> None:
    with command_lock(tmp_path / "state"):
        assert mode(tmp_path / "state") == 0o700


def test_monitoring_database_and_its_journal_files_are_private(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    store = Store(
        tmp_path, Limits(window_rows=1000, window_s=3600, feedback_rows=1000, feedback_s=3600)
    )
    store.merge(Part(1, {}, [Prediction("a", 0, 1, 0.0, "m", "dark", None)]), {})
    found = {path.name: mode(path) for path in tmp_path.glob(f"{DATABASE}*")}
    store.close()
    assert found == {f"{DATABASE}{suffix}": 0o600 for suffix in ("", "-wal", "-shm")}


def test_a_remediation_proposal_is_readable_by_the_owner_only(tmp_path: Path) -> None:
    judgement = {"features": [], "estimate": {"valid": False, "reason": "there are no labels"}}
    path = write_proposal(tmp_path, None, "model/fp32", 0.0, 1.0, 100, judgement)
    assert (mode(path), mode(path.parent)) == (0o600, 0o700)


def test_rollout_state_with_its_secret_salt_is_private(tmp_path: Path) -> None:
    change_rollout(tmp_path, lambda rollout: rollout.with_event("refused", "0" * 12, "why"))
    assert mode(tmp_path / FILE) == 0o600
