"""The evidence for or against a canary, which callers cannot manipulate."""

import asyncio
import json
import multiprocessing
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from slipway.artifacts.bundle import load_bundle
from slipway.serving.http.responses import Refusal
from slipway.serving.models.live_model import LiveModel
from slipway.serving.rollout.candidate.canary import Canary, SeenIds, is_chosen
from slipway.serving.rollout.evidence import Counts, Evidence
from slipway.serving.rollout.reports import FOLDER
from slipway.serving.rollout.state import Allowed, RolloutPlan, read_rollout
from slipway.serving.settings import Settings
from slipway.serving.worker import ModelWorker
from tests.serving.bundles import COLUMNS, row_classifier, table_row
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import canary_of, put_in_place_of
from tests.serving.rolling import (
    PICTURES,
    begin_canary,
    last_event,
    run,
    salt_of,
    settle,
    write_candidate,
)

JSON = {"content-type": "application/json"}


def ids(settings: Settings, share: float, num_ids: int, *, chosen: bool = True) -> list[str]:
    """Return ids of requests that the candidate, or the stable model, is drawn to answer."""
    salt, number = salt_of(settings), 0
    found: list[str] = []
    while len(found) < num_ids:
        number += 1
        if is_chosen(f"id-{number}", share, salt) == chosen:
            found.append(f"id-{number}")
    return found


def counts_of(worker: ModelWorker) -> Counts:
    assert canary_of(worker)
    counts: Counts = canary_of(worker)._evidence.counts()
    return counts


async def is_not_rolled_back(worker: ModelWorker) -> bool:
    await asyncio.sleep(1.5)  # longer than a report and a decision take
    return canary_of(worker) is not None and last_event(worker)[0] != "rolled_back"


@pytest.mark.process
@pytest.mark.usefixtures("unrehearsed")
def test_repeated_invalid_requests_do_not_count_as_evidence(
    new_bundle: Path, make_settings: MakeSettings
) -> None:
    settings = make_settings(shadow_fraction=0)

    async def work(client: Any, worker: ModelWorker) -> None:
        await begin_canary(worker, new_bundle, RolloutPlan())
        for one in [*ids(settings, 0.01, 6), *ids(settings, 0.01, 6, chosen=False)]:
            assert (
                await client.post("/predict", content=b"no image", headers={"x-request-id": one})
            ).status_code == 422
        counts = counts_of(worker)
        assert (counts.requests, counts.of("errors")) == ((0, 0), {})
        assert await is_not_rolled_back(worker)

    run(settings, work)


@pytest.mark.process
@pytest.mark.usefixtures("unrehearsed")
def test_requests_of_a_canary_cannot_be_predicted_from_public_values(
    new_bundle: Path, make_settings: MakeSettings
) -> None:
    settings = make_settings(shadow_fraction=0)
    candidate = load_bundle(new_bundle).version
    foreseen = [one for one in map(str, range(100)) if is_chosen(one, 0.5, candidate)]

    async def work(client: Any, worker: ModelWorker) -> None:
        salts = set()
        for _ in range(2):
            await begin_canary(worker, new_bundle)
            salts.add(salt_of(settings))
            versions = [
                (
                    await client.post(
                        "/predict", content=PICTURES[0], headers={"x-request-id": one}
                    )
                ).json()["model_version"]
                for one in foreseen
            ]
            assert set(versions) == {candidate, load_bundle(settings.bundle).version}
            shown = (await client.get("/rollout")).text
            assert salt_of(settings) not in shown
            await client.post("/rollout", json={"command": "rollback"}, headers=JSON)
            await settle(worker, lambda: canary_of(worker) is None)
        assert len(salts) == 2  # what was found out about one rollout says nothing of the next
        assert all(len(salt) >= 32 for salt in salts)

    run(settings, work)


@pytest.mark.process
@pytest.mark.usefixtures("unrehearsed")
def test_a_request_id_counts_as_evidence_only_once(
    new_bundle: Path, make_settings: MakeSettings
) -> None:
    settings = make_settings(shadow_fraction=0)

    async def work(client: Any, worker: ModelWorker) -> None:
        await begin_canary(worker, new_bundle, RolloutPlan())

        def fail(batch: Any) -> Any:
            raise RuntimeError("planted")

        (known, explained, repeated) = ids(settings, 0.01, 3)

        async def ask(path: str, one: str) -> None:
            assert (
                await client.post(path, content=PICTURES[0], headers={"x-request-id": one})
            ).status_code == 200

        await ask("/predict", known)  # its caller reads whose it is
        await ask("/explain", explained)
        assert canary_of(worker)
        put_in_place_of(canary_of(worker).live, fail)
        for one in (known, explained, repeated):
            for _ in range(5):
                await ask("/predict", one)
        counts = counts_of(worker)
        assert (counts.requests, counts.of("errors")) == ((2, 0), {0.01: (1, 0)})
        assert await is_not_rolled_back(worker)

    run(settings, work)


@pytest.mark.process
@pytest.mark.usefixtures("unrehearsed")
def test_a_candidate_that_refuses_valid_requests_is_rolled_back(
    certified_table: Path, make_settings: MakeSettings
) -> None:
    settings = make_settings(shadow_fraction=0)
    narrower = [
        one.model_copy(update={"max": 30.0}) if one.name == "age" else one
        for one in COLUMNS.columns
    ]
    bundle = write_candidate(
        certified_table / "new",
        row_classifier(),
        input=COLUMNS.model_copy(update={"columns": narrower}),
    )
    row = json.dumps(table_row(0) | {"age": 40.0})

    async def work(client: Any, worker: ModelWorker) -> None:
        await begin_canary(worker, bundle, allowed=Allowed(other_contract=True))
        for number in range(60):
            response = await client.post(
                "/predict", content=row, headers=JSON | {"x-request-id": f"old-{number}"}
            )
            assert response.status_code == 200  # the stable model's
        counts = counts_of(worker)
        assert counts.of("errors")[0.5] == (counts.requests[0], 0)
        await settle(worker, lambda: last_event(worker)[0] == "rolled_back")
        assert "fail more often than the stable model's" in last_event(worker)[1]

    run(settings, work)


class Asked:
    """A canary whose two models have planned outcomes for a request."""

    def __init__(
        self, tmp_path: Path, candidate: BaseException | None, stable: BaseException | None
    ) -> None:
        self.evidence = Evidence()
        self.candidate, self.stable = (LiveModel.__new__(LiveModel) for _ in range(2))
        self._says = {id(self.candidate): candidate, id(self.stable): stable}
        self._canary = Canary(
            self.candidate, self.evidence, "salt", SeenIds(tmp_path / "of.used", "salt")
        )
        self._canary.fraction = 1.0

    def ask(self, *, of_candidate: bool = True) -> Counts:
        self._canary.fraction = float(of_candidate)

        async def answer(live: LiveModel) -> dict[str, Any]:
            error = self._says[id(live)]
            if error:
                raise error
            return {}

        async def main() -> None:
            with suppress(Refusal, asyncio.CancelledError):
                await self._canary.predict("one", lambda: self.stable, answer)

        asyncio.run(main())
        return self.evidence.counts()


def refusal(code: str) -> Refusal:
    return Refusal(code, "planted")


@pytest.mark.parametrize(
    ("candidate", "stable", "requests", "errors", "is_fault"),
    [
        (None, None, 1, 0, False),
        (refusal("undecodable"), refusal("undecodable"), 0, 0, False),
        (refusal("undecodable"), None, 1, 1, False),
        (refusal("transform_failed"), None, 1, 1, False),
        (refusal("model_failed"), None, 1, 1, False),
        (refusal("model_failed"), refusal("model_failed"), 1, 0, False),
        (refusal("model_failed"), refusal("undecodable"), 1, 0, False),
        (refusal("invalid_answer"), None, 1, 1, True),
        (refusal("invalid_answer"), refusal("invalid_answer"), 1, 0, False),
        (refusal("queue_full"), None, 0, 0, False),
        (refusal("undecodable"), refusal("queue_full"), 0, 0, False),
        (asyncio.CancelledError(), None, 1, 1, False),
        (refusal("undecodable"), asyncio.CancelledError(), 0, 0, False),
    ],
)
def test_failure_of_the_candidate_counts_if_the_stable_model_predicts(
    tmp_path: Path,
    candidate: BaseException | None,
    stable: BaseException | None,
    requests: int,
    errors: int,
    is_fault: bool,
) -> None:
    counts = Asked(tmp_path, candidate, stable).ask()
    assert counts.requests == (requests, 0)
    assert counts.of("errors") == ({1.0: (errors, 0)} if errors else {})
    assert bool(counts.fault) == is_fault


@pytest.mark.parametrize(
    ("stable", "requests", "errors"),
    [
        (None, 1, 0),
        (refusal("undecodable"), 0, 0),
        (refusal("queue_full"), 0, 0),
        (refusal("transform_failed"), 1, 1),
        (refusal("model_failed"), 1, 1),
        (asyncio.CancelledError(), 1, 1),
    ],
)
def test_invalid_requests_do_not_count_as_errors_of_the_stable_model(
    tmp_path: Path, stable: BaseException | None, requests: int, errors: int
) -> None:
    counts = Asked(tmp_path, None, stable).ask(of_candidate=False)
    assert counts.requests == (0, requests)
    assert counts.of("errors") == ({0.0: (0, errors)} if errors else {})


def first(path: Path) -> bool:
    return SeenIds(path, "salt").add("one")


def test_seen_request_ids_are_shared_by_all_workers(tmp_path: Path) -> None:
    path = tmp_path / FOLDER / "7.used"
    with multiprocessing.get_context("fork").Pool(2) as workers:
        assert [workers.apply(first, (path,)) for _ in range(4)] == [True, False, False, False]
    assert not first(path)
    assert SeenIds(path, "salt").add("another")
    assert (
        path.stat().st_blocks * 512 >= path.stat().st_size
    )  # a full disk is an error here, and no signal later


def test_worker_without_a_shared_file_remembers_its_own_request_ids(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("where a folder should be")
    uses = SeenIds(tmp_path / "file" / "7.used", "salt")
    assert [uses.add(one) for one in ("a", "b", "a", "b")] == [True, True, False, False]
    assert "cannot share the request ids" in caplog.text


@pytest.mark.usefixtures("unrehearsed")
def test_the_file_of_seen_ids_is_removed_with_the_rollout(
    new_bundle: Path, make_settings: MakeSettings
) -> None:
    settings = make_settings(shadow_fraction=0)

    async def work(client: Any, worker: ModelWorker) -> None:
        await begin_canary(worker, new_bundle)
        candidate = read_rollout(settings.state).candidate
        assert candidate
        assert [path.stem for path in (settings.state / FOLDER).glob("*.used")] == [
            str(candidate.id)
        ]
        await client.post("/rollout", json={"command": "rollback"}, headers=JSON)
        await settle(worker, lambda: not list((settings.state / FOLDER).glob("*.used")))

    run(settings, work)
