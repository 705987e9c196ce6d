"""Markup in texts, classes and columns stays text on every page, in a real browser."""

import asyncio
import csv
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import warm_starts
from tests.end_to_end.project import Project, copy_checkout, wait_until_ready
from tests.end_to_end.test_texts import PARAMS, STAGES
from tests.sentences import sentences
from tests.serving.browser import browsing, command

pytestmark = [
    pytest.mark.nightly(seconds=120),
    pytest.mark.skipif(
        command() is None, reason="there is no Chromium here (Debian: apt-get install chromium)"
    ),
]
RUN = "document.documentElement.dataset.ran=1"
HOSTILE = (
    f"<script>{RUN}</script>",
    f'"><img src=x onerror="{RUN}">',
    f"'--></style></textarea><svg onload={RUN}>",
    f"<a href=javascript:{RUN}>{{{{{RUN}}}}}</a>",
)
CLASSES = {"food": f"{HOSTILE[0]}food", "travel": f"{HOSTILE[1]}travel"}
TEXT, LABEL = f"{HOSTILE[1]} text", f"{HOSTILE[2]} label"
READY = "document.getElementById('state').dataset.state === 'ready'"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project whose every third text has markup, with a refused row and personal data."""
    project = copy_checkout(tmp_path_factory.mktemp("markup"))
    with (project.path / "data/sentences.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([LABEL, TEXT])
        for number, (label, text) in enumerate(sentences(400, seed=1)):
            markup = HOSTILE[number // 3 % len(HOSTILE)] if number % 3 == 0 else ""
            writer.writerow([CLASSES[label], f"{markup}{text}{markup}"])
        writer.writerow([CLASSES["food"], f"{HOSTILE[0]} write to a@b.com"])
        writer.writerow([CLASSES["food"], "  "])
    project.set_params(PARAMS)
    project.keep_own_keys()
    project.set_params(
        {
            "data": {"text_columns": [TEXT], "target_column": LABEL},
            "precompute": {"max_text_bytes": 256},
        }
    )
    (project.path / "dvc.lock").unlink(missing_ok=True)  # of a run in this checkout
    variables = project.environment() | {"PYTHONPATH": str(project.path)}
    for stage in STAGES:
        done = warm_starts.run([f"slipway.stages.{stage}"], project.path, variables, timeout=300)
        assert done.returncode == 0, done.stderr
    return project


def dumped(address: str) -> str:
    """The document of a page after its scripts have run."""
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000")
    done = subprocess.run(
        [str(command()), *flags, "--dump-dom", address], capture_output=True, text=True, timeout=60
    )
    return done.stdout


def test_no_report_runs_what_texts_classes_and_columns_hold(hostile: Project) -> None:
    pages = sorted((hostile.path / "reports").glob("*.html"))
    assert {"clean.html", "data.html", "evaluate.html", "verify.html"} <= {
        page.name for page in pages
    }
    for page in pages:
        document = dumped(page.as_uri())
        assert "</html>" in document, page.name
        assert "data-ran" not in document.partition("<head>")[0], page.name
        assert '<img src="x"' not in document, page.name
    assert "&lt;script&gt;document" in dumped((hostile.path / "reports/clean.html").as_uri())


@pytest.fixture(scope="module")
def service(hostile: Project) -> Iterator[str]:
    with hostile.service() as address:
        wait_until_ready(address)
        yield address


def test_the_page_shows_markup_in_fields_answers_and_marks_as_text(
    service: str, tmp_path: Path
) -> None:
    assert "data-ran" not in dumped(f"{service}/").partition("<head>")[0]

    async def work() -> None:
        async with browsing(tmp_path / "browser") as tab:
            await tab.open(f"{service}/")
            await tab.wait_for(READY)
            assert await tab.text(".field .name") == TEXT
            for number, markup in enumerate(HOSTILE, 1):
                text = f"{markup} the soup tastes salty"
                await tab.run(f"document.getElementById('cell-0').value = {json.dumps(text)}")
                await tab.run("document.querySelector('form.form').requestSubmit()")
                await tab.wait_for(f"document.querySelectorAll('.explanation').length === {number}")
                assert markup in await tab.text(".marked")
                headline = await tab.text(".answer .headline")
                assert any(headline.startswith(name) for name in CLASSES.values())
            assert await tab.run("document.querySelectorAll('img[src=x], svg[onload]').length") == 0
            assert not await tab.run("document.documentElement.dataset.ran")
            assert tab.complaints == []

    asyncio.run(asyncio.wait_for(work(), 120))
