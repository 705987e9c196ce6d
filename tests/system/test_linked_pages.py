"""Messages name a page of the docs by a URL, which everybody can open, and never by a path."""

import re
import tomllib
from email.message import Message
from importlib.metadata import PackageNotFoundError

import pytest

from slipway.serving.http.responses import Refusal
from slipway.system import version
from slipway.system.command_line import CommandParser
from slipway.system.errors import DataError, SealError, linked
from tests.conftest import ROOT

pytestmark = pytest.mark.unit
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
URL = PROJECT["urls"]["Documentation"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see docs/how-to/loop.md.", f"see {URL}/docs/how-to/loop.html."),
        ("(docs/reference/a.md#b-c)", f"({URL}/docs/reference/a.html#b-c)"),
        ("data/docs/how-to/a.md, docs/own.md", "data/docs/how-to/a.md, docs/own.md"),
        (f"{URL}/docs/how-to/a.md", f"{URL}/docs/how-to/a.md"),
    ],
)
def test_only_the_pages_of_our_docs_become_urls(text: str, shown: str) -> None:
    assert linked(text) == shown


def test_errors_refusals_and_help_name_pages_by_url() -> None:
    page = "see docs/how-to/loop.md"
    parser = CommandParser(description=page)
    said = [str(DataError(page)), str(SealError("")), str(Refusal("rollout_invalid", page))]
    for text in [*said, parser.format_help()]:
        assert f"{URL}/docs/" in text
        assert not re.search(r"docs/[\w/-]+\.md", text)


def test_an_installed_package_reads_the_url_from_its_metadata(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = Message()
    found["Project-URL"] = "Source, https://example.com"
    found["Project-URL"] = f"Documentation, {URL}"
    monkeypatch.setattr(version, "asset", lambda name: ROOT / "no" / name)
    monkeypatch.setattr("importlib.metadata.metadata", lambda name: found)
    assert version.documentation_url.__wrapped__() == URL


def test_a_bento_of_a_clone_names_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(version, "asset", lambda name: ROOT / "no" / name)
    monkeypatch.setattr("importlib.metadata.metadata", absent)
    assert version.documentation_url.__wrapped__() == ""
