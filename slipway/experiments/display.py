"""`slipway show`: the page of all reports, in a browser or served on loopback."""

import functools
import os
import re
import sys
import webbrowser
from html import escape, unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from slipway.experiments.comparison import read_comparison
from slipway.experiments.page import comparison_page
from slipway.reports.pages.html_page import Html, cards, figure, page, paragraph, section
from slipway.system import files
from slipway.system.errors import UnavailableError

REPORTS = Path("reports")
INDEX = REPORTS / "index.html"
_HOSTS = ("127.0.0.1", "localhost")
# Title and sentence of each report, by its file name.
_PAGES = {
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


class ReportHandler(SimpleHTTPRequestHandler):
    """Serves the folder to this machine's browsers only, and logs nothing."""

    def send_head(self):  # type: ignore[no-untyped-def] # as the library declares it
        host = (self.headers.get("Host") or "").rpartition(":")[0] or self.headers.get("Host")
        if host not in _HOSTS:  # another site whose name points to this machine (DNS rebinding)
            self.send_error(403, "Use http://127.0.0.1")
            return None
        return super().send_head()

    def log_message(self, format: str, *args: object) -> None:
        """Drop the server's log line of each request."""


def write_index() -> Path:
    """Write the page of experiments and the page of all reports; return the latter's path."""
    comparison = read_comparison()
    if comparison.every:
        files.write_text(REPORTS / "experiments.html", comparison_page(comparison))
    files.write_text(INDEX, index_page(REPORTS))
    return INDEX


def open_page(path: Path) -> bool:
    """Open a page in the user's browser; False without a display, as over ssh."""
    has_display = sys.platform == "darwin" or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
    )
    if not has_display or os.environ.get("SSH_CONNECTION"):
        return False
    return webbrowser.open(path.resolve().as_uri())


def page_server(port: int) -> ThreadingHTTPServer:
    """Return an HTTP server of the reports on 127.0.0.1; port 0 chooses a free one."""
    handler = functools.partial(ReportHandler, directory=str(REPORTS))
    try:
        return ThreadingHTTPServer(("127.0.0.1", port), handler)
    except OSError as error:
        raise UnavailableError(
            f"port {port} of 127.0.0.1 cannot be used ({error.strerror}), expected a free one. "
            "Choose another: slipway show --port 0 takes any."
        ) from None


def index_page(folder: Path) -> str:
    """Return the HTML page that links to the reports in `folder`, to be written there."""
    known = [name for name in _PAGES if (folder / name).is_file()]
    others = [path.name for path in sorted(folder.glob("*.html"))]
    own = [name for name in others if name not in (*_PAGES, INDEX.name)]
    if not known and not own:
        text = "There is no report yet. `slipway run` writes them."
        return page("Reports", "", [section("Nothing to show", paragraph(text))])
    pieces = [_card(name, *_PAGES[name]) for name in known]
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
