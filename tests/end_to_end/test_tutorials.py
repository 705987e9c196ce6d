"""The commands of the tutorials, run in their order by somebody who has only Slipway."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.end_to_end.project import wait_until_live, wait_until_ready
from tests.serving.server import free_port

TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.md"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
PICTURE = re.compile(r"!\[.+\]\((.+?)\)")
LARGEST_PICTURE = 150_000  # bytes
SERVER, ADDRESS = "slipway serve", "http://127.0.0.1:3000"


@dataclass
class Reader:
    """Follows a tutorial: writes its files, runs its commands, and changes folders as it does."""

    folder: Path
    environment: dict[str, str]
    address: str = ADDRESS

    def write(self, text: str) -> None:
        """Write a block whose first line names its file."""
        (self.folder / text.splitlines()[0].removeprefix("# ")).write_text(text)

    def run(self, lines: str) -> str:
        """Run the lines of a block in one shell; return the output without the last folder."""
        answer = subprocess.run(
            ["bash", "-ec", f"{lines.replace(ADDRESS, self.address)}\necho\npwd"],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert answer.returncode == 0, f"{lines}\n{answer.stdout}"
        *said, last = answer.stdout.splitlines()
        self.folder = Path(last)
        return "\n".join(said)

    @contextlib.contextmanager
    def service(self) -> Iterator[None]:
        """Serve on a free port until the end."""
        port = free_port()
        self.address = f"http://127.0.0.1:{port}"
        path = self.folder / "service.log"
        with path.open("w") as log:
            process = subprocess.Popen(
                [*SERVER.split(), "--port", str(port)],
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            wait_until_live(self.address, process, path)
            wait_until_ready(self.address)
            yield
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(timeout=30)


@pytest.fixture(name="reader")
def _reader(tmp_path: Path) -> Reader:
    """A reader in an empty folder, with the command `slipway` of this checkout."""
    command = tmp_path / "bin" / "slipway"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m slipway.cli "$@"\n')
    command.chmod(0o755)
    path = os.pathsep.join(
        [str(command.parent), str(Path(sys.executable).parent), os.environ["PATH"]]
    )
    home = tmp_path / "home"
    home.mkdir()
    folder = tmp_path / "work"
    folder.mkdir()
    # DVC saves experiments as commits, for which git needs an author.
    (home / ".gitconfig").write_text("[user]\n    name = reader\n    email = reader@localhost\n")
    environment = {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "HOME": str(home),
        "GIT_CEILING_DIRECTORIES": str(tmp_path),  # the checkout ignores its own scratch folder
        "SLIPWAY_DRAIN_S": "0",
    }
    return Reader(folder, environment)


def follow(reader: Reader, page: str) -> str:
    """Follow the page; return the output of all commands."""
    said = []
    with contextlib.ExitStack() as services:
        for language, text in BLOCK.findall(page):
            if language == "python":
                reader.write(text)
            elif text.strip() == SERVER:
                services.enter_context(reader.service())
            elif language == "bash":
                said.append(reader.run(text))
    return "\n".join(said)


@pytest.mark.nightly(seconds=400)
def test_the_photographs_tutorial_certifies_predicts_and_compares_two_runs(reader: Reader) -> None:
    said = follow(reader, (ROOT / "docs/tutorials/photographs.md").read_text())
    assert '"label":"7"' in said.replace(" ", "")
    assert "certified" in said
    assert "longer" in said
    assert len((reader.folder / "sevens.csv").read_text().splitlines()) == 1 + len(
        list((reader.folder.parent / "digits/7").iterdir())
    )


@pytest.mark.nightly(seconds=200)
def test_the_tutorial_about_a_table_ends_with_answers_and_a_refusal(reader: Reader) -> None:
    said = follow(reader, (ROOT / "docs/tutorials/table.md").read_text())
    assert '"label":"1"' in said.replace(" ", "")
    assert '"missing_value"' in said
    assert len((reader.folder / "answers.csv").read_text().splitlines()) == 179


@pytest.mark.nightly(seconds=500)
def test_the_tutorial_about_texts_ends_with_answers_in_two_languages(reader: Reader) -> None:
    said = follow(reader, (ROOT / "docs/tutorials/texts.md").read_text())
    assert '"label":"spam"' in said.replace(" ", "")
    assert '"missing_value"' in said
    assert "masked" in said
    assert said.count("certified") >= 3
    answers = (reader.folder / "answers.csv").read_text().splitlines()
    assert (len(answers), reader.folder.name) == (601, "my_reviews")


@pytest.mark.nightly(seconds=420)
def test_the_tutorial_about_a_better_model_ends_with_members_in_the_report(reader: Reader) -> None:
    said = follow(reader, (ROOT / "docs/tutorials/a-better-model.md").read_text())
    assert "the best of 4 trials is" in said
    assert said.count(", certified") >= 2
    assert "gain over the best member" in said
    record = json.loads((reader.folder / "metrics/evaluate.json").read_text())
    assert len(record["members"][0]["members"]) >= 2
    assert "<h2>Members" in (reader.folder / "reports/evaluate.html").read_text()


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.name)
def test_every_picture_of_a_tutorial_exists_and_is_small(page: Path) -> None:
    pictures = [page.parent / name for name in PICTURE.findall(page.read_text())]
    assert pictures
    for picture in pictures:
        assert 5_000 < picture.stat().st_size < LARGEST_PICTURE, picture
