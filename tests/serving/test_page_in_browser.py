"""The page in a real browser, with a real service behind it."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from slipway.artifacts.bundle import Metric, OutputContract
from slipway.inputs.images import array_from_bytes
from tests import plain_http
from tests.inference.test_decided_classes import RULE, write_decided
from tests.serving.browser import Tab, browsing, command
from tests.serving.bundles import (
    COLUMNS,
    CONTRACT,
    LABELS,
    certify,
    picture,
    probabilities,
    row_classifier,
    row_sum,
    write_bundle,
)
from tests.serving.monitoring.monitored import monitored_bundle, pictures
from tests.serving.ready_service import ready_service
from tests.serving.server import Server, running
from tests.serving.test_page import TEXTS

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        command() is None, reason="there is no Chromium here (Debian: apt-get install chromium)"
    ),
]
HOSTILE = '<img src=x onerror="document.title=1">'
READY = "document.getElementById('state').dataset.state === 'ready'"
Work = Callable[[Tab, Server], Awaitable[None]]


def browse(folder: Path, server: Server, work: Work) -> None:
    """Run `work` in a new browser, which must report no problem and contact only the service."""

    async def main() -> None:
        async with browsing(folder / "browser") as tab:
            await work(tab, server)
            assert tab.complaints == []
            foreign = [
                address
                for address in tab.requested
                if not address.startswith((server.url, "data:", "blob:", "about:", "chrome:"))
            ]
            assert foreign == []

    asyncio.run(asyncio.wait_for(main(), 240))


def save_pictures(folder: Path, count: int) -> list[Path]:
    paths = [folder / f"picture{number}.png" for number in range(count)]
    for number, path in enumerate(paths):
        path.write_bytes(picture(number, (64, 48)))
    return paths


def label_of(path: Path) -> str:
    return LABELS[int(probabilities(array_from_bytes(path.read_bytes(), CONTRACT)[None]).argmax())]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with ready_service(tmp_path_factory.mktemp("images")) as server:
        yield server


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a service for a table with hostile names of columns, categories and labels."""
    folder = tmp_path_factory.mktemp("table")
    columns = [
        column.model_copy(
            update={"name": f"{HOSTILE} {column.name}"} if column.name == "age" else {}
        )
        for column in COLUMNS.columns
    ]
    columns = [
        column.model_copy(
            update={"quantiles": [17000.25, 19000.0]} if column.name == "since" else {}
        )
        for column in columns
    ]
    columns = [
        column.model_copy(
            update={"categories": [HOSTILE, "b", "c"]} if column.name == "colour" else {}
        )
        for column in columns
    ]
    labels = [f"{HOSTILE}{number}" for number in range(3)]
    output = OutputContract(kind="probabilities", labels=labels)
    contract = COLUMNS.model_copy(update={"columns": columns})
    certify(
        folder / "certificate.json",
        write_bundle(folder / "bundle", row_classifier(), input=contract, output=output),
    )
    with running(folder) as server:
        server.wait()
        yield server


async def joined(server: Server) -> None:
    """Wait until a sent label is joined to its prediction, which is stored seconds later."""
    for _ in range(60):
        if (
            'slipway_feedback_total{outcome="joined"} 1.0'
            in plain_http.get(server.url + "/metrics").text
        ):
            return
        await asyncio.sleep(0.5)
    raise AssertionError("the truth was not joined in 30 s")


def test_page_shows_the_prediction_for_a_picture_and_its_explanation(
    tmp_path: Path, images: Server
) -> None:
    (path,) = save_pictures(tmp_path, 1)

    async def work(tab: Tab, server: Server) -> None:
        await tab.open(server.url + "/")
        await tab.wait_for(READY)
        await tab.choose_files("#pictures", path)
        await tab.wait_for("document.querySelectorAll('.pixels').length === 2")
        assert (await tab.text(".headline")).split()[0] == label_of(path)
        assert await tab.run("document.querySelector('.bars').rows.length") == len(LABELS)
        assert label_of(path) in await tab.text("#announcement")
        assert "8 × 8 pixels" in await tab.text(".figures")
        assert await tab.run(
            "[...document.querySelectorAll('.pixels')].every((image) => image.naturalWidth > 0)"
        )
        version = plain_http.get(server.url + "/model").json()["model_version"]
        facts = await tab.text(".facts")
        assert version in facts
        assert version in await tab.text("#state")
        assert version in await tab.text("#model-content")
        await tab.run("document.querySelector('.feedback button').click()")  # right
        await tab.wait_for("document.querySelector('#answers').innerText.includes('Thank you')")
        await tab.wait_for("!document.querySelector('.feedback')")
        await joined(server)

    browse(tmp_path, images, work)


def test_page_shows_drift_and_quality_of_the_status(tmp_path: Path) -> None:
    monitored_bundle(tmp_path)

    async def work(tab: Tab, server: Server) -> None:
        await tab.open(server.url + "/")
        await tab.wait_for(READY)
        await tab.wait_for(
            "document.querySelector('#live-content').innerText.includes('No window has closed yet')"
        )
        await tab.wait_for(
            "document.querySelector('#live-content').innerText.includes('No feedback yet')"
        )
        for image in pictures(6, 450, shift=60):
            answer = plain_http.post(
                server.url + "/predict", content=image, headers={"content-type": "image/png"}
            ).json()
        truth = {"request_id": answer["request_id"], "ground_truth": answer["label"]}
        assert plain_http.post(server.url + "/feedback", json=truth).status_code in (200, 202)
        live = "document.querySelector('#live-content').innerText"
        await tab.wait_for(f"{live}.includes('differs from the validation rows')")
        await tab.wait_for(f"{live}.includes('By feedback: accuracy, 1 rows')")
        drift = plain_http.get(server.url + "/status").json()["drift"]
        shown = await tab.run("[...document.querySelectorAll('#live-content .bars tr')].length")
        assert shown == min(10, len(drift["features"]))
        assert drift["proposal"]["path"] in await tab.text("#live-content")

    with running(tmp_path, window_rows=200) as server:
        server.wait()
        browse(tmp_path, server, work)


def test_page_shows_the_prediction_or_the_fault_of_each_picture(
    tmp_path: Path, images: Server
) -> None:
    paths = save_pictures(tmp_path, 5)
    bad = tmp_path / f"{HOSTILE.replace('/', '')}.png"
    bad.write_bytes(b"no picture")

    async def work(tab: Tab, server: Server) -> None:
        await tab.open(server.url + "/")
        await tab.wait_for(READY)
        await tab.choose_files("#pictures", *paths, bad)
        await tab.wait_for(
            "document.querySelectorAll('article.answered').length === 5"
            " && document.querySelector('article.refused')"
        )
        answered = "[...document.querySelectorAll('article.answered')]"
        headline = "each.querySelector('.headline').innerText"
        shown = dict(await tab.run(f"{answered}.map((each) => [each.ariaLabel, {headline}])"))
        assert {name: label.split()[0] for name, label in shown.items()} == {
            path.name: label_of(path) for path in paths
        }
        refused = await tab.text("article.refused")
        assert "not a picture that the service can read" in refused
        assert "undecodable" in refused
        assert await tab.run("document.title") == "Slipway"
        assert [complaint for complaint in tab.complaints if "422" not in complaint] == []
        tab.complaints.clear()  # the browser's own line for a 422

    browse(tmp_path, images, work)


def test_page_shows_the_measured_coverage_of_prediction_sets(tmp_path: Path) -> None:
    measured = Metric(value=0.797, low=0.719, high=0.857, confidence=0.95, rows=138)
    certify(
        tmp_path / "certificate.json",
        write_bundle(tmp_path / "bundle", row_classifier(), coverage=measured),
    )
    said = {
        "en": (
            "contained the true label for 80 % of the test rows (target 90 %)",
            "the test rows allow 71.9 % to 85.7 %",
        ),
        "zh": ("在 80 % 的测试样本上包含真实标签（目标 90 %）", "置信区间为 71.9 % 至 85.7 %"),
    }

    async def work(tab: Tab, server: Server) -> None:
        for language, texts in said.items():
            await tab.open(server.url + "/", language)
            await tab.wait_for(READY)
            await tab.run("document.querySelector('form.form').requestSubmit()")
            await tab.wait_for("document.querySelector('article.answered')")
            for place in ("article.answered", "#model-content"):
                assert texts[1] in await tab.text(place)
            assert texts[0] in await tab.text("article.answered")
            assert "50" in await tab.text(
                "article.answered .notice"
            )  # the rows that it was fitted on

    with running(tmp_path) as server:
        server.wait()
        browse(tmp_path, server, work)


def test_page_builds_a_form_from_the_columns_and_shows_predictions_in_chinese(
    tmp_path: Path, table: Server
) -> None:
    async def work(tab: Tab, server: Server) -> None:
        await tab.open(server.url + "/", "zh-CN,zh;q=0.9")
        await tab.wait_for(READY)
        assert await tab.run("document.documentElement.lang") == "zh"
        example = plain_http.get(server.url + "/model").json()["input"]["example"]
        assert await tab.run(
            "[...document.querySelectorAll('.field .name')].map((each) => each.innerText)"
        ) == list(example)
        assert await tab.run("document.querySelectorAll('.field .required').length") == 3
        assert await tab.run(
            "[document.getElementById('cell-5').type, document.getElementById('cell-5').value]"
        ) == ["datetime-local", "2019-07-23T00:00"]
        await tab.run("document.getElementById('cell-4').selectedIndex = 1")  # member: true
        await tab.run("document.querySelector('form.form').requestSubmit()")
        await tab.wait_for("document.querySelector('.explanation .bars')")
        row = example | {"member": True}
        answer = plain_http.post(server.url + "/predict", json=row).json()
        assert (await tab.text(".headline")).startswith(answer["label"])
        assert await tab.run("document.querySelectorAll('.explanation .bars tr').length") == 1
        assert "member 是" in await tab.text(".explanation .bars th")
        assert "预测" in await tab.text("form.form")
        assert await tab.run("document.title") == "Slipway"  # nothing of the bundle ran
        assert await tab.run("document.querySelectorAll('img[src=x]').length") == 0

    browse(tmp_path, table, work)


def test_page_marks_and_focuses_a_refused_cell(tmp_path: Path, table: Server) -> None:
    async def work(tab: Tab, server: Server) -> None:
        await tab.open(server.url + "/")
        await tab.wait_for(READY)
        await tab.run("document.getElementById('cell-0').value = '121'")
        await tab.run("document.querySelector('form.form').requestSubmit()")
        await tab.wait_for("document.querySelector('form.form .problem').innerText")
        assert await tab.run(
            "[document.activeElement.id, document.activeElement.hasAttribute('aria-invalid')]"
        ) == ["cell-0", True]
        assert "at most 120" in await tab.text("form.form .problem")
        await tab.run("document.getElementById('cell-0').value = '119'")
        await tab.run("document.querySelector('form.form').requestSubmit()")
        await tab.wait_for("document.querySelector('article.answered')")
        assert await tab.run("document.querySelectorAll('[aria-invalid]').length") == 0
        tab.complaints.clear()  # the browser's own line for a 422

    browse(tmp_path, table, work)


def test_page_switches_the_language_at_once_and_remembers_it(
    tmp_path: Path, images: Server
) -> None:
    (path,) = save_pictures(tmp_path, 1)

    async def work(tab: Tab, server: Server) -> None:
        await tab.open(server.url + "/", "en")
        await tab.wait_for(READY)
        await tab.choose_files("#pictures", path)
        await tab.wait_for("document.querySelector('.pixels')")
        await tab.run("document.querySelector('[data-language=zh]').click()")
        await tab.wait_for("document.documentElement.lang === 'zh'")
        assert "模型关注的区域" in await tab.text("#answers")  # what was answered before, too
        assert "就绪" in await tab.text("#state")
        await tab.open(server.url + "/?again", "en")
        await tab.wait_for(READY)
        assert "在线试用" in await tab.text("#try-title")

    browse(tmp_path, images, work)


REFUSE_TO_EXPLAIN = """
window.reached = window.fetch;
window.refusal = "model_failed";
window.refused = () => new Response(
  JSON.stringify({error: {
    code: window.refusal,
    message: "the model failed on what is to be explained",
    field: null,
    request_id: "x",
  }}),
  {status: 500, headers: {"content-type": "application/json"}},
);
window.fetch = (path, options) =>
  path !== "explain" ? window.reached(path, options) : Promise.resolve(window.refused());
null"""


def test_page_gives_the_reason_for_no_explanation_in_the_readers_language_only(
    tmp_path: Path, images: Server
) -> None:
    (path,) = save_pictures(tmp_path, 1)

    async def said(tab: Tab, code: str) -> str:
        await tab.run(
            f"window.refusal = '{code}'; document.querySelector('[data-focus=explain]').click()"
        )
        await tab.wait_for("document.querySelector('article.answered .problem')")
        return await tab.text("article.answered .problem")

    async def work(tab: Tab, server: Server) -> None:
        await tab.open(server.url + "/", "zh-CN")
        await tab.wait_for(READY)
        await tab.run(REFUSE_TO_EXPLAIN)
        await tab.choose_files("#pictures", path)
        await tab.wait_for("document.querySelector('article.answered .problem')")
        assert (
            await tab.text("article.answered .problem") == TEXTS["zh"]["explain.error.model_failed"]
        )
        for code in ("invalid_answer", "deadline_exceeded"):
            assert await said(tab, code) == TEXTS["zh"][f"explain.error.{code}"]
        assert await said(tab, "unheard_of") == "暂时无法分析（unheard_of）。"
        await tab.run("document.querySelector('[data-language=en]').click()")
        await tab.wait_for("document.documentElement.lang === 'en'")
        assert (
            await tab.text("article.answered .problem")
            == "This cannot be explained now (unheard_of)."
        )

    browse(tmp_path, images, work)


def test_keyboard_reaches_every_control_in_order(tmp_path: Path, images: Server) -> None:
    async def work(tab: Tab, server: Server) -> None:
        await tab.open(server.url + "/")
        await tab.wait_for(READY)
        reached = []
        for _ in range(11):
            await tab.press("Tab")
            reached.append(
                await tab.run(
                    "document.activeElement.className || document.activeElement.id"
                    " || document.activeElement.innerText"
                )
            )
            assert await tab.run("document.activeElement.matches(':focus-visible')")
        assert reached[:8] == [
            "skip",
            "Try it",
            "Live",
            "Model",
            "Use it",
            "English",
            "中文",
            "pictures",
        ]
        await tab.run("document.querySelector('[data-language=zh]').focus()")
        await tab.press("Enter")
        await tab.wait_for("document.documentElement.lang === 'zh'")
        assert await tab.run("document.activeElement.dataset.language") == "zh"  # still there

    browse(tmp_path, images, work)


def test_page_asks_for_a_key_stores_it_in_the_tab_and_sends_it(tmp_path: Path) -> None:
    certify(tmp_path / "certificate.json", write_bundle(tmp_path / "bundle"))
    (path,) = save_pictures(tmp_path, 1)
    key, keys = "planted-key-of-a-caller", tmp_path / "keys"
    keys.write_text(f"reader:caller:{hashlib.sha256(key.encode()).hexdigest()}\n")
    keys.chmod(0o600)

    async def work(tab: Tab, server: Server) -> None:
        await tab.open(server.url + "/")
        await tab.wait_for("document.getElementById('state').dataset.state === 'no_key'")
        for given, state in (("wrong", "no_key"), (key, "ready")):
            await tab.run(f"document.getElementById('key-value').value = {given!r}")
            await tab.run("document.getElementById('key').requestSubmit()")
            await tab.wait_for(f"document.getElementById('state').dataset.state === {state!r}")
            if given != key:
                problem = "document.getElementById('key-problem').innerText"
                await tab.wait_for(f"{problem}.includes('This key is not known')")
        assert await tab.run("document.getElementById('key').hidden")
        await tab.choose_files("#pictures", path)
        await tab.wait_for("document.querySelectorAll('.pixels').length === 2")
        assert (await tab.text(".headline")).split()[0] == label_of(path)
        assert "authorization: Bearer $SLIPWAY_KEY" in await tab.text("#command")
        assert key not in await tab.run(
            "document.documentElement.outerHTML + JSON.stringify(localStorage)"
        )
        assert all("401" in complaint for complaint in tab.complaints)
        tab.complaints.clear()  # the browser's own lines for a 401

    with running(tmp_path, keys=keys) as server:
        server.wait()
        browse(tmp_path, server, work)


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_page_is_never_wider_than_the_window(tmp_path: Path, table: Server, width: int) -> None:
    async def work(tab: Tab, server: Server) -> None:
        await tab.open(server.url + "/")
        await tab.look(width, is_dark=True)
        await tab.wait_for(READY)
        await tab.run("document.getElementById('cell-4').selectedIndex = 1")
        await tab.run("document.querySelector('form.form').requestSubmit()")
        await tab.wait_for("document.querySelector('.explanation .bars')")
        assert await tab.run("document.documentElement.scrollWidth") <= width
        dark, light = await tab.run("getComputedStyle(document.body).backgroundColor"), None
        await tab.look(width)
        light = await tab.run("getComputedStyle(document.body).backgroundColor")
        assert dark != light
        small = await tab.run(
            "[...document.querySelectorAll('button, input, select')]"
            ".filter((each) => each.offsetHeight && each.offsetHeight < 24).length"
        )
        assert small == 0  # WCAG 2.2, 2.5.8: targets of 24 px

    browse(tmp_path, table, work)


def test_page_updates_figures_only_while_it_is_visible(tmp_path: Path, images: Server) -> None:
    async def work(tab: Tab, server: Server) -> None:
        await tab.open(server.url + "/")
        await tab.wait_for(READY)
        for number in range(20):
            plain_http.post(
                server.url + "/predict",
                content=picture(number),
                headers={"content-type": "image/png"},
            )
        await tab.wait_for("document.querySelector('.line.one')?.getAttribute('d').includes('L')")
        assert "HTTP 200" in await tab.text("#live-content")
        await tab.run(
            "Object.defineProperty(document, 'hidden', { value: true, configurable: true })"
        )
        await asyncio.sleep(0.5)
        asked = sum(address.endswith("/status") for address in tab.requested)
        await asyncio.sleep(2.6)  # more than the two seconds between two polls
        assert sum(address.endswith("/status") for address in tab.requested) == asked
        await tab.run(
            "delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))"
        )
        await asyncio.sleep(0.5)
        assert sum(address.endswith("/status") for address in tab.requested) > asked

    browse(tmp_path, images, work)


def test_page_shows_the_reason_for_a_missing_model(tmp_path: Path) -> None:
    write_bundle(tmp_path / "bundle", row_sum())

    async def work(tab: Tab, server: Server) -> None:
        await tab.open(server.url + "/")
        await tab.wait_for("document.getElementById('state').dataset.state === 'not_ready'")
        assert "nothing proves this bundle" in await tab.text("#reason")
        assert await tab.run("document.querySelector('#input').children.length") == 0
        assert "curl" in await tab.text("#command")

    with running(tmp_path) as server:
        server.wait("/livez")
        browse(tmp_path, server, work)


def test_page_shows_a_value_with_columns_and_without_labels(tmp_path: Path) -> None:
    certify(tmp_path / "certificate.json", write_bundle(tmp_path / "bundle", row_sum()))

    async def work(tab: Tab, server: Server) -> None:
        await tab.open(server.url + "/")
        await tab.wait_for(READY)
        await tab.run("document.getElementById('cell-0').value = '119'")
        await tab.run("document.querySelector('form.form').requestSubmit()")
        await tab.wait_for("document.querySelector('.explanation .bars')")
        row = plain_http.get(server.url + "/model").json()["input"]["example"] | {"age": 119}
        value = plain_http.post(server.url + "/predict", json=row).json()["value"]
        assert float((await tab.text(".headline")).replace(",", "")) == pytest.approx(
            value, rel=1e-3, abs=1e-3
        )
        assert (await tab.text(".explanation .bars .number")).startswith(
            "+6.44"
        )  # (119 - 38.5) / 12.5, all that changed

    with running(tmp_path) as server:
        server.wait()
        browse(tmp_path, server, work)


def test_page_shows_the_cost_of_a_decision_and_asks_for_a_person(tmp_path: Path) -> None:
    write_decided(tmp_path, RULE.model_copy(update={"abstain_between": (0.0, 2.0)}))

    async def work(tab: Tab, server: Server) -> None:
        await tab.open(server.url + "/")
        await tab.wait_for(READY)
        await tab.run("document.querySelector('form.form').requestSubmit()")
        await tab.wait_for("document.querySelector('.answer .notice')")
        assert TEXTS["en"]["answer.abstain"] in await tab.text(".answer")
        assert TEXTS["en"]["answer.cost"].format(cost="0.5") in await tab.text(".answer")

    with running(tmp_path) as server:
        server.wait()
        browse(tmp_path, server, work)


def test_page_reports_an_unreachable_service_and_retries(tmp_path: Path, images: Server) -> None:

    async def work(tab: Tab, server: Server) -> None:
        await tab.open(server.url + "/")
        await tab.wait_for(READY)
        await tab.call(
            "Network.emulateNetworkConditions",
            offline=True,
            latency=0,
            downloadThroughput=0,
            uploadThroughput=0,
        )
        await tab.wait_for("document.getElementById('state').dataset.state === 'no_answer'")
        assert "tries again by itself" in await tab.text("#reason")
        await tab.call(
            "Network.emulateNetworkConditions",
            offline=False,
            latency=0,
            downloadThroughput=-1,
            uploadThroughput=-1,
        )
        await tab.wait_for(READY)
        assert await tab.text("#reason") == ""
        tab.complaints.clear()  # the browser's own lines for the requests that failed

    browse(tmp_path, images, work)
