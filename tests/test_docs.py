"""The pages match the code: params keys and their readers, outputs, links, commands."""

import ast
import importlib.util
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.conf import DIAGRAM, diagram_name
from slipway.cli.documentation import page
from slipway.cli.verbs import VERBS
from slipway.config.params import parse_params
from slipway.config.stage_graph import read_pipeline
from slipway.data.rules.rules import IMAGE_RULES, TABLE_RULES
from slipway.kinds.targets import CLASS, LABELS, NUMBER

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/reference/params.md").read_text()
METRICS = (ROOT / "docs/reference/metrics.md").read_text()
PIPELINE = (ROOT / "docs/reference/pipeline.md").read_text()
STAGES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
PAGES = [
    *(ROOT / name for name in ("README.md", "README.zh.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
CODE = re.compile(r"^ *```\w*\n(.*?)^ *```|`([^`\n]+)`", flags=re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")


def test_page_of_params_is_generated_from_the_sections_and_dvc_yaml() -> None:
    """`make params-page` writes it."""
    assert page(read_pipeline({"data": {"path": "${data.path}"}})) == PAGE


def test_page_of_params_has_values_default_and_meaning_of_a_key() -> None:
    (row,) = re.findall(r"^\| `max_bad_fraction` .*$", PAGE, flags=re.MULTILINE)
    assert "| a number of at least 0 and at most 1 | `0.05` | The stage fails if" in row
    assert re.search(r"`learning_rate` .* `0.001; small_resnet: 0.004; ", PAGE)
    assert "| `gates.NAME.min` |" in PAGE


def missing_outputs(page: str) -> set[str]:
    """List outputs in dvc.yaml that docs/reference/pipeline.md lacks in the row of their stage."""
    rows = dict(re.findall(r"^\| `(\w+)`(.+)$", page, flags=re.MULTILINE))
    found = set()
    for stage, content in STAGES.items():
        outputs = [
            out if isinstance(out, str) else next(iter(out))
            for out in (*content.get("outs", []), *content.get("metrics", []))
        ]
        found |= {
            output
            for output in outputs
            if f"`{output}" not in rows[stage] and output != f"artifacts/seals/{stage}.json"
        }
    return found


def test_pipeline_page_lists_every_output() -> None:
    assert missing_outputs(PIPELINE) == set()


def test_check_reports_a_missing_output_of_the_pipeline_page() -> None:
    assert missing_outputs(PIPELINE.replace("`reports/clean.html`", "a page")) == {
        "reports/clean.html"
    }


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path, text: str) -> list[str]:
    """List links to files or headings that do not exist."""
    found = []
    for name, anchor in LINK.findall(text):
        target = (page.parent / name) if name else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            found.append(f"{page.name}: {name}#{anchor}")
    return found


def test_every_link_of_the_docs_has_a_target() -> None:
    assert [link for page in PAGES for link in broken_links(page, page.read_text())] == []


def test_check_reports_a_broken_link() -> None:
    text = (
        "[a](pipeline.md) [b](gone.md) [c](bundle.md#engine) [d](bundle.md#chairs) "
        "[e](https://example.org)"
    )
    assert broken_links(ROOT / "docs/reference/params.md", text) == [
        "params.md: gone.md#",
        "params.md: bundle.md#chairs",
    ]


def steps(page: str, heading: str) -> list[str]:
    """Return the items of the numbered list below a heading."""
    text = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return re.split(r"^\d+\. ", text, flags=re.MULTILINE)[1:]


def undefined_names(step: str) -> list[str]:
    """List the functions, classes and constants that none of the modules of a step defines."""
    spans = re.findall(r"`([^`]+)`", step)
    defined: set[str] = set()
    for path in (span for span in spans if span.endswith(".py")):
        for node in ast.parse((ROOT / path).read_text()).body:
            targets = [node.target] if isinstance(node, ast.AnnAssign) else []
            defined |= {target.id for target in targets if isinstance(target, ast.Name)}
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                defined |= {node.name, *(f"{node.name}.{name}" for name in methods(node))}
    names = [name for name in spans if re.fullmatch(r"\w+(\.(?!yaml)\w+)?", name)]
    return [name for name in names if name not in defined] if names else [step]


def methods(node: ast.AST) -> list[str]:
    body = node.body if isinstance(node, ast.ClassDef) else []
    return [one.name for one in body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]


@pytest.mark.parametrize("path", ["The path of a request", "The path of `slipway run`"])
def test_each_step_of_a_path_through_the_code_names_functions_of_its_modules(path: str) -> None:
    found = steps((ROOT / "docs/explanation/architecture.md").read_text(), path)
    assert len(found) >= 7
    assert [name for step in found for name in undefined_names(step)] == []


def test_a_step_with_a_renamed_function_or_without_one_is_reported() -> None:
    module = "`slipway/serving/models/batching.py`"
    page = f"## A\n\n1. {module}: `MicroBatcher.submit`, `MicroBatcher.add`\n2. {module}\n\n## B\n"
    assert [undefined_names(step) for step in steps(page, "A")] == [
        ["MicroBatcher.add"],
        [f"{module}\n"],
    ]


def broken_anchors(text: str) -> list[str]:
    """List the headings of pages that a text of the code names and that do not exist."""
    named = re.findall(r"(docs/[\w/.-]+\.md)#([\w-]+)", text)
    return [
        f"{page}#{anchor}"
        for page, anchor in named
        if anchor not in anchors((ROOT / page).read_text())
    ]


def test_every_heading_of_a_page_that_the_code_names_exists() -> None:
    sources = [path.read_text() for path in (ROOT / "slipway").rglob("*.py")]
    assert any("#sealed-inputs" in source for source in sources)
    assert [anchor for source in sources for anchor in broken_anchors(source)] == []


def test_a_heading_that_does_not_exist_is_reported() -> None:
    text = "See docs/reference/pipeline.md#sealed-inputs, docs/reference/pipeline.md#seals."
    assert broken_anchors(text) == ["docs/reference/pipeline.md#seals"]


def is_module(name: str) -> bool:
    found = importlib.util.find_spec(name)
    return found is not None and (
        not found.submodule_search_locations
        or importlib.util.find_spec(f"{name}.__main__") is not None
    )


def unknown_commands(page: str) -> set[str]:
    """List verbs of `slipway`, modules after `python -m` and make targets that do not exist."""
    code = "\n".join(block or span for block, span in CODE.findall(page))
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    verbs = re.findall(r"(?:^|&& |; )slipway ([a-z][a-z-]*)", code, flags=re.MULTILINE)
    made = re.findall(r"(?:^|&& )make ([a-z-]+)", code, flags=re.MULTILINE)
    modules = re.findall(r"python -m ([\w.]+)", code)
    return {
        *(f"slipway {verb}" for verb in verbs if verb not in {*VERBS, "help"}),
        *(f"make {target}" for target in made if target not in targets),
        *(f"python -m {name}" for name in modules if not is_module(name.replace("NAME", "train"))),
    }


def test_every_command_mentioned_in_the_docs_exists() -> None:
    found = {page.name: unknown_commands(page.read_text()) for page in PAGES}
    assert {name: unknown for name, unknown in found.items() if unknown} == {}


def test_check_reports_a_command_that_does_not_exist() -> None:
    text = "`slipway fly`, `slipway check`\n```bash\nmake nothing\npython -m slipway.gone\n```\n"
    assert unknown_commands(text) == {"slipway fly", "make nothing", "python -m slipway.gone"}


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, coming = set(), [ROOT / "README.md"]
    while coming:
        page = coming.pop()
        reached.add(page)
        linked = {
            (page.parent / name).resolve()
            for name, _ in LINK.findall(page.read_text())
            if name.endswith(".md")
        }
        coming += linked - reached - set(coming)
    assert [page.name for page in PAGES if page not in reached] == []


@pytest.mark.nightly(seconds=28)
def test_the_site_builds_and_every_link_and_anchor_in_it_leads_somewhere() -> None:
    done = subprocess.run(["make", "site"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    page = (ROOT / ".work/site/html/index.html").read_text()
    assert "docs/how-to/operations.html" in page


def test_decisions_are_numbered_without_a_gap() -> None:
    pages = sorted((ROOT / "docs/decisions").glob("0*.md"))
    assert [page.name[:4] for page in pages] == [
        f"{number:04d}" for number in range(1, len(pages) + 1)
    ]
    assert [page.read_text().split(".")[0] for page in pages] == [
        f"# {number}" for number in range(1, len(pages) + 1)
    ]


def unnamed_rules(page: str, rules: Iterable[str]) -> set[str]:
    """List the rules that a page lacks."""
    return {rule for rule in rules if f"`{rule}`" not in page}


def test_docs_list_every_cleaning_rule() -> None:
    assert unnamed_rules((ROOT / "docs/reference/data.md").read_text(), IMAGE_RULES) == set()
    assert unnamed_rules((ROOT / "docs/reference/tables.md").read_text(), TABLE_RULES) == set()


def test_check_reports_a_rule_that_the_pages_lack() -> None:
    assert unnamed_rules("`blurred`, too_dark", ["blurred", "too_dark"]) == {"too_dark"}


def unnamed_metrics(page: str) -> set[str]:
    """List the metrics that the page lacks in the section of their kind of target."""
    sections = {"Classes": CLASS, "Several labels": LABELS, "Numbers": NUMBER}
    return {
        name
        for title, target in sections.items()
        for name in target.metrics
        if f"`{name}`" not in page.partition(f"## {title}\n")[2].partition("\n## ")[0]
    }


def test_the_page_of_metrics_defines_those_of_each_kind_of_target() -> None:
    assert unnamed_metrics(METRICS) == set()


def test_a_metric_that_the_page_lacks_for_its_kind_of_target_is_reported() -> None:
    assert unnamed_metrics(METRICS.replace("`hamming_loss`", "errors")) == {"hamming_loss"}


def unnamed_scripts(page: str) -> set[str]:
    """List the files of launch/ that a page lacks."""
    return {path.name for path in (ROOT / "launch").iterdir() if f"launch/{path.name}" not in page}


def test_scaling_page_mentions_every_file_of_launch() -> None:
    assert unnamed_scripts((ROOT / "docs/how-to/scaling.md").read_text()) == set()


def test_check_reports_a_script_that_the_scaling_page_lacks() -> None:
    assert unnamed_scripts(
        (ROOT / "docs/how-to/scaling.md").read_text().replace("launch/ci", "a folder")
    ) == {"ci"}


def test_the_changelog_begins_with_the_version_of_the_package() -> None:
    version = re.search(
        r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE
    )
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert version
    assert newest
    assert newest[1] == version[1]


@pytest.mark.parametrize("page", ["docs/reference/tables.md", "docs/reference/params.md"])
def test_block_that_a_page_calls_a_whole_params_yaml_is_one(page: str) -> None:
    block = yaml.safe_load(_first_block(page))
    assert parse_params(block).train.network == "tabm"


def _first_block(page: str) -> str:
    return (ROOT / page).read_text().split("```yaml\n")[1].split("```")[0]


def test_each_diagram_has_a_picture_of_its_present_source() -> None:
    sources = {source for page in PAGES for source in DIAGRAM.findall(page.read_text())}
    pictures = {path.name for path in (ROOT / "docs/pictures").glob("diagram_*.svg")}
    assert len(sources) > 1
    assert pictures == {diagram_name(source) for source in sources}
