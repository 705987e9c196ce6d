"""`reports/index.html`: every report that exists, with a small view and one sentence."""

from pathlib import Path

from slipway.reports.pages.index_page import index_page


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
