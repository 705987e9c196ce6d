"""Builds `reports/index.html`: links to all reports, each with a preview and a sentence."""

import re
from html import escape, unescape
from pathlib import Path

from slipway.reports.pages.html_page import Html, cards, figure, page, paragraph, section

_REPORTS = {
    "evaluate.html": ("Evaluation", "Metrics, gates and slices on test rows, and the worst errors"),
    "verify.html": ("Certificate", "Every variant and live HTTP against the trained network"),
    "leaderboard.html": ("Variants", "Loss, size and speed of each exported variant"),
    "experiments.html": ("Experiments", "Every run with its changed params and its results"),
    "search.html": (
        "Search",
        "Trials of the last search, its winner, and the optimism of choosing",
    ),
    "clean.html": ("Cleaning", "Refused and flagged rows, and the rule that each broke"),
    "split.html": ("Split", "Rows and classes of train, val and test, and leaks between them"),
    "data.html": ("Data", "Samples of each class and brightness, or a profile of each column"),
    "augment.png": ("Augmentation", "Training rows after each operation"),
    "label_issues.html": ("Labels", "Rows whose label is probably wrong"),
    "profile.html": ("Profile", "The time of a training step, part by part"),
}
_TITLE = re.compile(r"<title>(.*?)</title>", re.DOTALL)
INDEX = "index.html"


def index_page(folder: Path) -> str:
    """Return the HTML page that links to the reports in `folder`, to be written there."""
    known = [name for name in _REPORTS if (folder / name).is_file()]
    others = [path.name for path in sorted(folder.glob("*.html"))]
    own = [name for name in others if name not in (*_REPORTS, INDEX)]
    if not known and not own:
        text = "There is no report yet. `slipway run` writes them."
        return page("Reports", "", [section("Nothing to show", paragraph(text))])
    pieces = [_card(name, *_REPORTS[name]) for name in known]
    pieces += [_card(name, _title(folder / name), name) for name in own]
    return page("Reports", "Each is one file; click to open it", [cards(pieces)])


def _title(path: Path) -> str:
    found = _TITLE.search(path.read_text(errors="replace"))
    return unescape(found[1].strip()) if found else path.name


def _card(name: str, title: str, sentence: str) -> Html:
    link = escape(name)
    if name.endswith(".png"):
        view = f'<img src="{link}" alt="" loading="lazy">'
    else:  # the page itself, small: it may not be clicked or reached by the keyboard
        view = f'<iframe src="{link}" title="" tabindex="-1" loading="lazy"></iframe>'
    return figure(Html(f'<a class="view" href="{link}">{view}</a>'), title, sentence)
