"""A Chinese page and its English one agree in commands, names, figures, links and alerts."""

import re
from pathlib import Path

import pytest

from tests.monitoring.queries import alerts

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.zh.md", *sorted((ROOT / "docs").rglob("*.zh.md"))]
OPERATIONS = ROOT / "docs/how-to/operations.zh.md"
BLOCK = re.compile(r"^```.*?^```", flags=re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"(?:^| +)# .*$", flags=re.MULTILINE)
OTHER_LANGUAGE = re.compile(r"\[(?:中文|English)\]\(.+?\)")


def english_of(page: Path) -> Path:
    return page.with_name(page.name.replace(".zh.md", ".md"))


def outline(page: str) -> list[str]:
    """Return the levels of headings and the code blocks without comments, in order."""
    parts = re.findall(r"^(#+) |^(```.*?^```)", page, flags=re.DOTALL | re.MULTILINE)
    return [level or COMMENT.sub("", block) for level, block in parts]


def prose(page: str) -> str:
    """The page without blocks of code and hidden comments."""
    return re.sub(r"<!--.*?-->", "", BLOCK.sub("", page))


def names(page: str) -> list[set[str]]:
    """For each section, the settings, metrics and commands in its sentences and tables."""
    sections = re.split(r"^#+ ", prose(page), flags=re.MULTILINE)
    return [
        {" ".join(code.split()) for code in re.findall(r"`([^`]+)`", section)}
        for section in sections
    ]


def figures(page: str) -> list[str]:
    """The numbers outside code and links, sorted."""
    text = re.sub(r"`[^`]+`|\]\([^)]*\)", "", prose(page))
    return sorted(re.findall(r"\d+(?:[.,]\d+)*", text))


def links(page: str) -> list[str]:
    """The linked pages with their anchors, without the link to the other language, sorted."""
    found = re.findall(r"\]\(([^#\s)][^\s)]*)\)", OTHER_LANGUAGE.sub("", page))
    return sorted(link.replace(".zh.md", ".md") for link in found)


def alert_links(page: str) -> list[str]:
    return sorted(re.findall(r"\]\(#(slipway\w+)\)", page))


def alert_headings(page: str) -> list[str]:
    return re.findall(r"^### (Slipway\w+)$", page, flags=re.MULTILINE)


def differences(english: str, chinese: str) -> set[str]:
    """List the properties in which two pages differ."""
    readings = (outline, names, figures, links, alert_links, alert_headings)
    return {read.__name__ for read in readings if read(english) != read(chinese)}


def chinese_runbook(page: str) -> dict[str, list[str]]:
    """The parts of each alert's section."""
    sections = re.findall(r"^### (Slipway\w+)\n(.*?)(?=^#|\Z)", page, flags=re.M | re.S)
    return {name: re.findall(r"^\* \*\*(\w+)：\*\* ", text, flags=re.M) for name, text in sections}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_chinese_page_agrees_with_its_english_one(page: Path) -> None:
    assert differences(english_of(page).read_text(), page.read_text()) == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_two_languages_of_a_page_link_to_each_other(page: Path) -> None:
    english = english_of(page)
    assert f"[English]({english.name})" in page.read_text()
    assert f"[中文]({page.name})" in english.read_text()


def test_chinese_runbook_has_checks_decisions_and_actions_for_every_alert() -> None:
    parts = ["检查", "判断", "处理"]
    assert chinese_runbook(OPERATIONS.read_text()) == dict.fromkeys(alerts(), parts)


@pytest.mark.parametrize(
    ("part", "instead", "difference"),
    [
        ("rollout status", "rollout state", "outline"),
        ("## 告警", "### 告警", "outline"),
        ("`SLIPWAY_MAX_QUEUE`", "`SLIPWAY_QUEUE`", "names"),
        ("`slipway_memory_bytes`", "`slipway_bytes`", "names"),
        ("161 MB", "160 MB", "figures"),
        ("(rollout.md)", "(replay.md)", "links"),
        ("(#slipwayfaults)", "(#slipwaydown)", "alert_links"),
        ("### SlipwayGpuHot\n", "### SlipwayHot\n", "alert_headings"),
    ],
)
def test_each_difference_of_a_chinese_page_is_detected(
    part: str, instead: str, difference: str
) -> None:
    english, chinese = english_of(OPERATIONS).read_text(), OPERATIONS.read_text()
    assert part in chinese
    assert difference in differences(english, chinese.replace(part, instead))


def test_comments_in_code_may_be_translated() -> None:
    english = "```\nmake demo # prints the results\n# then\n```\n"
    chinese = "```\nmake demo # 打印结果\n# 然后\n```\n"
    assert differences(english, chinese) == set()


def test_a_missing_part_of_the_chinese_runbook_is_detected() -> None:
    page = OPERATIONS.read_text().replace("**判断：**", "**结论：**", 1)
    assert chinese_runbook(page)["SlipwayUnavailableFast"] == ["检查", "结论", "处理"]
