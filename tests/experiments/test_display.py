"""`slipway show`: the page of all reports with a view and a sentence each, and its server."""

import threading
from pathlib import Path

import httpx
import pytest

from slipway.experiments.display import index_page, open_page, page_server
from slipway.system.errors import UnavailableError


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of reports in the working directory, with one page."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "reports"
    folder.mkdir()
    (folder / "index.html").write_text("all reports")
    return folder


def test_the_reports_are_served_to_this_machine_by_its_own_name_only(reports: Path) -> None:
    (reports.parent / "params.yaml").write_text("seed: 7")
    with page_server(0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            address = f"http://127.0.0.1:{server.server_address[1]}"
            assert httpx.get(f"{address}/").text == "all reports"
            assert httpx.get(f"{address}/", headers={"Host": "evil.example"}).status_code == 403
            assert httpx.get(f"{address}/%2e%2e/params.yaml").status_code == 404
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.usefixtures("reports")
def test_error_for_a_port_in_use_proposes_another() -> None:
    with page_server(0) as server, pytest.raises(UnavailableError, match="--port 0 takes any"):
        page_server(server.server_address[1])


@pytest.mark.parametrize("display", [{}, {"DISPLAY": ":0", "SSH_CONNECTION": "10.0.0.1 1 2 3"}])
def test_no_browser_is_opened_without_a_display_or_over_ssh(
    display: dict[str, str], reports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in display.items():
        monkeypatch.setenv(name, value)
    assert not open_page(reports / "index.html")


def test_the_page_shows_each_existing_report_with_a_view_and_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "evaluate.html").write_text("<title>Evaluation</title>")
    (tmp_path / "augment.png").write_bytes(b"")
    page = index_page(tmp_path)
    assert '<iframe src="evaluate.html"' in page
    assert '<img src="augment.png"' in page
    assert "Metrics, gates and slices" in page
    assert "verify.html" not in page
    assert "<script" not in page


def test_pages_that_slipway_did_not_write_are_listed_by_their_title(tmp_path: Path) -> None:
    (tmp_path / "mine.html").write_text("<title>Mine &amp; <b>yours</title>")
    (tmp_path / "index.html").write_text("<title>Reports</title>")
    page = index_page(tmp_path)
    assert "Mine &amp; &lt;b&gt;yours" in page
    assert "index.html" not in page


def test_without_reports_the_page_says_what_writes_them(tmp_path: Path) -> None:
    assert "slipway run" in index_page(tmp_path)
