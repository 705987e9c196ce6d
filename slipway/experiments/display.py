"""`slipway show`: the page of all reports, in a browser or served on loopback."""

import functools
import os
import sys
import webbrowser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from slipway.experiments.comparison import read_comparison
from slipway.experiments.page import comparison_page
from slipway.reports.pages.index_page import index_page
from slipway.system import files
from slipway.system.errors import UnavailableError

REPORTS = Path("reports")
INDEX = REPORTS / "index.html"
_HOSTS = ("127.0.0.1", "localhost")


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


def open_page(page: Path) -> bool:
    """Open a page in the user's browser; False without a display, as over ssh."""
    has_display = sys.platform == "darwin" or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
    )
    if not has_display or os.environ.get("SSH_CONNECTION"):
        return False
    return webbrowser.open(page.resolve().as_uri())


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
