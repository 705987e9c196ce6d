"""The page's files: texts, languages, external requests, and HTTP headers."""

import gzip
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest

from slipway.serving.explaining.extension import explain_routes
from slipway.serving.page.site import FOLDER, LANGUAGES, choose_language, read_site, takes_gzip
from slipway.serving.worker import ModelWorker
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import error_of, full_worker, run

# That a browser gets with the page in one language: the bars, thresholds and feedback of several
# labels are beside those of classes, and texts have their own hints, marks and tasks.
MOST_BYTES = 62_500
SCRIPTS = "\n".join(path.read_text() for path in sorted(FOLDER.glob("*.js")))
HTML = (FOLDER / "index.html").read_text()
TEXTS: dict[str, dict[str, str]] = {
    language: json.loads((FOLDER / f"{language}.json").read_text()) for language in LANGUAGES
}
# Keys that a script composes of a prefix and a value from the service.
MADE_OF = (
    "ask.",
    "drift.",
    "error.",
    "explain.error.",
    "feature.",
    "feedback.",
    "form.",
    "hop.",
    "metric.",
    "model.gates.",
    "reason.",
    "state.",
    "task.",
)
FORBIDDEN = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc"
    r"|https?://(?!www\.w3\.org/2000/svg)"
)


def placeholders(text: str) -> set[str]:
    return set(re.findall(r"\{(\w+)\}", text))


def test_page_texts_have_the_same_names_and_placeholders_in_all_languages() -> None:
    first, *others = LANGUAGES
    for language in others:
        assert list(TEXTS[language]) == list(TEXTS[first])
        for key, text in TEXTS[language].items():
            assert placeholders(text) == placeholders(TEXTS[first][key]), key
            assert text.strip() == text != "", key


def test_page_texts_of_a_language_use_its_script() -> None:
    chinese = re.compile(r"[\u4e00-\u9fff]")
    names = {"gpu.title"}
    assert [key for key, text in TEXTS["en"].items() if chinese.search(text)] == []
    assert {key for key, text in TEXTS["zh"].items() if not chinese.search(text)} == names


def test_every_page_text_is_used_and_every_used_text_exists() -> None:
    used = set(re.findall(r'"((?:[a-z]+)\.[a-z_]+)"', SCRIPTS + HTML)) & set(TEXTS["en"])
    asked = set(re.findall(r'\bt\(\s*"([\w.]+)"', SCRIPTS)) | set(
        re.findall(r'data-(?:text|label)="([\w.]+)"', HTML)
    )
    assert asked - set(TEXTS["en"]) == set()
    assert {key for key in set(TEXTS["en"]) - used if not key.startswith(MADE_OF)} == set()


def test_the_check_of_translations_finds_a_missing_text() -> None:
    asked = set(re.findall(r'\bt\(\s*"([\w.]+)"', 't("try.nothing")'))
    assert asked - set(TEXTS["en"]) == {"try.nothing"}


def test_the_page_loads_nothing_external_and_turns_no_text_into_markup() -> None:
    for path in sorted(FOLDER.iterdir()):
        if path.suffix in (".js", ".css", ".html"):
            assert FORBIDDEN.findall(path.read_text()) == [], path.name


@pytest.mark.parametrize(
    "bad", ['node.innerHTML = "x"', 'import "https://cdn.example/x.js"', "eval(text)"]
)
def test_the_check_of_the_page_finds_markup_from_text_and_external_scripts(bad: str) -> None:
    assert FORBIDDEN.search(bad)


class Inline(HTMLParser):
    """Collects inline code that a strict content security policy forbids, and every address."""

    def __init__(self) -> None:
        super().__init__()
        self.inline: list[str] = []
        self.addresses: list[str] = []
        self._tag = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        self.inline += [name for name, _ in attrs if name.startswith("on") or name == "style"]
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        if self._tag in ("script", "style") and data.strip():
            self.inline.append(data)


@pytest.mark.parametrize("language", LANGUAGES)
def test_start_page_is_translated_and_links_only_existing_files(
    language: str,
) -> None:
    site = read_site()
    page = site.pages[language].plain.decode()
    parser = Inline()
    parser.feed(page)
    assert parser.inline == []
    files = [address for address in parser.addresses if not address.startswith("#")]
    assert files
    assert all(site.file(f"/{address}") for address in files)
    assert f'<html lang="{language}"' in page
    assert TEXTS[language]["page.noscript"] in page
    assert f'aria-label="{TEXTS[language]["page.sections"]}"' in page
    assert "{{" not in page


def test_the_check_of_the_start_page_finds_inline_scripts_and_styles() -> None:
    parser = Inline()
    parser.feed('<p style="color: red" onclick="x()"></p><script>alert(1)</script>')
    assert parser.inline == ["style", "onclick", "alert(1)"]


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_start_page_and_its_files_are_small(language: str) -> None:
    site = read_site()
    others = {f"{other}.json" for other in LANGUAGES if other != language}
    loaded = [
        site.pages[language],
        *(file for name, file in site.files.items() if name not in others),
    ]
    assert sum(len(file.gzipped) for file in loaded) < MOST_BYTES / 2
    assert all(gzip.decompress(file.gzipped) == file.plain for file in loaded)


@pytest.mark.parametrize(
    ("accepted", "language"),
    [
        ("", "en"),
        ("zh", "zh"),
        ("zh-CN,zh;q=0.9,en;q=0.8", "zh"),
        ("en-GB,en;q=0.9,zh;q=0.8", "en"),
        ("de,zh;q=0.2,en;q=0.1", "zh"),
        ("fr", "en"),
        ("*", "en"),
        ("zh;q=0", "en"),
        ("ZH-hant-TW", "zh"),
        (";;;,q=,\x00<script>", "en"),
        ("zh;q=" + "9" * 5000, "en"),
    ],
)
def test_the_page_uses_the_preferred_language_of_the_browser(accepted: str, language: str) -> None:
    assert choose_language(accepted) == language


@pytest.mark.parametrize(
    ("accepted", "takes"),
    [
        ("", False),
        ("gzip", True),
        ("br, gzip", True),
        ("gzip;q=0", False),
        ("gzip;q=0.0, br", False),
        ("gzip; q=0.3", True),
        ("x-gzip", False),
    ],
)
def test_page_files_are_compressed_for_browsers_that_accept_gzip(
    accepted: str, takes: bool
) -> None:
    assert takes_gzip(accepted) is takes


def test_start_page_does_not_depend_on_the_model_or_the_request(
    certified: Path, make_settings: MakeSettings
) -> None:
    pages: list[str] = []

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        pages.append(
            (await client.get("/", headers={"host": "alert(1)", "accept-language": "<b>"})).text
        )
        pages.append((await client.get("/?x=<script>alert(2)</script>")).text)

    run(make_settings(), work)
    (certified / "certificate.json").unlink()
    run(make_settings(), work)
    assert len(set(pages)) == 1
    assert "alert(" not in pages[0]


def test_page_files_are_cached_as_immutable_only_under_their_digest(
    make_settings: MakeSettings,
) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        site = read_site()
        for name, file in site.files.items():
            answer = await client.get(f"/static/{site.digest}/{name}")
            assert (answer.status_code, answer.content) == (200, file.plain)
            assert answer.headers["content-encoding"] == "gzip"  # httpx takes it, and unpacks it
            assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
            assert answer.headers["x-content-type-options"] == "nosniff"
        plain = await client.get(
            f"/static/{site.digest}/app.js", headers={"accept-encoding": "identity"}
        )
        assert "content-encoding" not in plain.headers
        assert plain.headers["content-type"] == "text/javascript; charset=utf-8"
        before = await client.get(
            "/static/0000000000000000/app.js"
        )  # of a page that was loaded from another version
        assert (before.status_code, before.headers["cache-control"]) == (200, "no-store")

    run(make_settings(), work)


@pytest.mark.parametrize(
    "path",
    [
        "app.js",
        "x/y/app.js",
        "x/nothing.js",
        "x/site.py",
        "x/index.html",
        "x/..%2fsite.py",
        "x/",
        "",
    ],
)
def test_unknown_paths_below_static_get_404(make_settings: MakeSettings, path: str) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        assert error_of(await client.get(f"/static/{path}"))["code"] == "not_found"

    run(make_settings(), work)


def test_the_content_security_policy_allows_only_own_files(make_settings: MakeSettings) -> None:
    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        answer = await client.get("/", headers={"accept-language": "zh"})
        policy = dict(
            part.strip().split(" ", 1)
            for part in answer.headers["content-security-policy"].split(";")
        )
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert (answer.headers["content-language"], answer.headers["vary"]) == (
            "zh",
            "accept-language, accept-encoding",
        )
        assert answer.headers["cache-control"] == "no-store"

    run(make_settings(), work)


def test_every_explanation_error_is_translated(
    make_settings: MakeSettings,
) -> None:
    describe = explain_routes(full_worker(make_settings()))["/explain"].describe
    assert describe
    # A page with a prediction has sent one valid item: only these errors of /predict are left.
    possible = {"explain_busy", "deadline_exceeded", "model_failed", "invalid_answer", "not_ready"}
    assert possible < {*describe(None).errors}
    assert "queue_full" not in describe(None).errors  # which is of predictions alone
    for language in LANGUAGES:
        assert [
            code
            for code in sorted(possible)
            if not {f"explain.error.{code}", f"error.{code}"} & TEXTS[language].keys()
        ] == []
