"""The label page by its keys, in a real browser: labels, skip, undo and people who disagree."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slipway.artifacts.bundle import OutputContract
from slipway.artifacts.label_sets import set_text
from slipway.curation.label_desk import LabelDesk, label_server
from slipway.traffic.monitoring_records import read_ground_truth
from tests.curation.test_label_desk import MARKUP, answer_rows, callers, open_desk
from tests.serving.browser import Tab, browsing, command
from tests.serving.bundles import LABELS

pytestmark = [
    pytest.mark.nightly(seconds=40),
    pytest.mark.skipif(
        command() is None, reason="there is no Chromium here (Debian: apt-get install chromium)"
    ),
]


@contextmanager
def served(desk: LabelDesk) -> Iterator[str]:
    """Serve the page of a desk; yield its address."""
    server = label_server(desk, 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.address
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        desk.close()


async def type_keys(tab: Tab, *steps: tuple[str, str]) -> None:
    """Press keys, and wait after each for the text that the page has to show then."""
    for key, text in steps:
        await tab.press(key)
        await tab.wait_for(f"document.body.innerText.includes({text!r})")


def in_browser(profile: Path, work: Callable[[Tab], Awaitable[None]]) -> None:
    async def run() -> None:
        async with browsing(profile) as tab:
            await work(tab)
            assert tab.complaints == []

    asyncio.run(asyncio.wait_for(run(), 120))


def test_on_the_label_page_digits_label_a_row_s_skips_it_and_u_undoes(tmp_path: Path) -> None:
    answer_rows(tmp_path)
    state = tmp_path / "state"
    dark, grey, bright = LABELS

    async def work(tab: Tab) -> None:
        with served(open_desk(tmp_path, "anna", opinions=2)) as address:
            await tab.open(address)
            await tab.wait_for("document.querySelector('#row dl')")
            assert MARKUP in await tab.text("#row")
            assert await tab.text("#labels") == f"1{dark}\n2{grey}\n3{bright}"
            await type_keys(tab, ("1", "1 left"), ("s", "No row is waiting"))
            await tab.press("1")  # without a row it labels nothing
            await type_keys(tab, ("u", "1 left"), ("u", "2 left"), ("2", "1 left"), ("1", "0 left"))
            assert callers(state) == {}  # two people have to agree
        with served(open_desk(tmp_path, "ben", opinions=2)) as address:
            await tab.open(address)
            await tab.wait_for("document.body.innerText.includes('2 left')")
            await type_keys(tab, ("2", "1 left"), ("2", "People disagree"))
            assert "r-2, item 0: anna: dark; ben: grey" in await tab.text("#conflicts")
            assert callers(state) == {"r-1": (grey, "chosen:ben")}
        with served(open_desk(tmp_path, "cleo", opinions=2)) as address:
            await tab.open(address)
            await tab.wait_for("document.body.innerText.includes('1 left')")
            await type_keys(tab, ("3", "cleo: bright"), ("u", "1 left"), ("1", "No row is waiting"))
            assert "People disagree" not in await tab.text("body")
            assert callers(state)["r-2"] == (dark, "label-queue:cleo")
            await type_keys(tab, ("u", "People disagree"))
            assert list(callers(state)) == ["r-1"]

    in_browser(tmp_path / "browser", work)


@pytest.mark.parametrize("kind", ["value", "label_probabilities"])
def test_enter_saves_a_typed_number_or_the_labels_that_are_switched_on(
    tmp_path: Path, kind: str
) -> None:
    answer_rows(tmp_path)
    desk = open_desk(tmp_path, "anna")
    labels = [] if kind == "value" else LABELS
    output = OutputContract(kind=kind, labels=labels)
    desk.manifest = desk.manifest.model_copy(update={"output": output})

    async def work(tab: Tab) -> None:
        with served(desk) as address:
            await tab.open(address)
            await tab.wait_for("document.querySelector('#labels button')")
            if kind == "value":
                await type_keys(tab, ("Enter", "Enter a number"))
            for key in "121" if kind == "value" else "1213":  # the first label is off again
                await tab.press(key)
            await tab.press("Enter")
            await tab.wait_for("document.body.innerText.includes('1 left')")

    in_browser(tmp_path / "browser", work)
    (found,) = read_ground_truth(tmp_path / "state")
    assert found.value == 121 if kind == "value" else found.label == set_text(LABELS[1:])
