"""Sphinx's settings for `make site`: the pages as GitHub shows them, and every link checked."""

from pygments.lexers.special import TextLexer
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


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Append the side bar's table of contents to the README, where GitHub would show it as code."""
    if page == app.config.root_doc:
        folders = ("tutorials", "how-to", "reference", "explanation", "decisions")
        source[0] += "".join(_CONTENTS.replace("FOLDER", folder) for folder in folders)


def setup(app: Sphinx) -> None:
    """Register the table of contents, and show Mermaid's drawings as text: it needs a network."""
    app.connect("source-read", add_contents)
    app.add_lexer("mermaid", TextLexer)
