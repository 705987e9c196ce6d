"""Sphinx's settings for `make site`: the pages as GitHub shows them, and every link checked."""

import hashlib
import os
import re
from pathlib import Path

from sphinx.application import Sphinx

project = "Slipway"
root_doc = "README"
extensions = ["myst_parser"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = "Slipway"
html_copy_source = False
html_show_copyright = False
highlight_language = "none"
smartquotes = False
suppress_warnings = ["toc.not_included"]

_CONTENTS = """
```{toctree}
:hidden:
:glob:
:caption: FOLDER
docs/FOLDER/*
```
"""


DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def diagram_name(source: str) -> str:
    """Return the file in docs/pictures that shows a Mermaid diagram, named after its digest."""
    return f"diagram_{hashlib.sha256(source.encode()).hexdigest()[:12]}.svg"


def show_diagrams(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace Mermaid's sources by their pictures: Mermaid itself needs a network."""
    folder = os.path.relpath("docs/pictures", Path(page).parent)
    source[0] = DIAGRAM.sub(
        lambda found: f"![Diagram]({folder}/{diagram_name(found[1])})", source[0]
    )


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Append the side bar's table of contents to the README, where GitHub would show it as code."""
    if page == app.config.root_doc:
        folders = ("tutorials", "how-to", "reference", "explanation", "decisions")
        source[0] += "".join(_CONTENTS.replace("FOLDER", folder) for folder in folders)


def setup(app: Sphinx) -> None:
    """Register what changes a page before it is read."""
    app.connect("source-read", show_diagrams)
    app.connect("source-read", add_contents)
