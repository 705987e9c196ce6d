"""README, tutorials and how-tos, run as they stand there by readers with the wheel or a clone."""

import re
import shutil
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.conftest import ROOT
from tests.end_to_end.pages import Reader, blocks_of, install_wheel, missing, reader
from tests.end_to_end.project import Project, copy_checkout, copy_finished, draw_shapes

README = ROOT / "README.md"
TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.md"))
HOW_TOS = sorted((ROOT / "docs/how-to").glob("*.md"))
PICTURE = re.compile(r"!\[.+\]\((.+?)\)")
LARGEST_PICTURE = 150_000  # bytes
SECTION = "\n## "
CODE = ("", "bash", "python")


@pytest.fixture(name="wheel", scope="session")
def _wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands of an environment with the wheel."""
    return install_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(name="with_wheel")
def _with_wheel(wheel: Path, tmp_path: Path) -> Reader:
    """A reader in an empty folder, who has the wheel."""
    return reader(tmp_path / "work", tmp_path / "home", wheel)


@pytest.fixture(name="with_clone")
def _with_clone(tmp_path: Path) -> Reader:
    """A reader in an empty folder, with the active environment of a clone beside it."""
    clone = copy_checkout(_made(tmp_path / "clone")).path
    home = {"BENTOML_HOME": str(clone / ".bentoml")}
    return reader(tmp_path / "work", tmp_path / "home", clone / ".venv/bin", **home)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def bring_photographs(reader: Reader) -> None:
    """Bring what readers of a page have themselves: photographs of four classes, and one more."""
    draw_shapes(reader.folder / "photographs")
    Image.open(reader.folder / "photographs/ring/02.png").save(reader.folder / "picture.jpg")


def home_of(reader: Reader) -> list[Path]:
    return list(Path(reader.environment["HOME"]).rglob("*"))


def sections(page: Path) -> dict[str, str]:
    """The text below each heading of the second level."""
    first, *others = page.read_text().split(SECTION)
    return {"": first, **{text.partition("\n")[0]: text for text in others}}


@pytest.mark.process
def test_the_readme_leads_from_own_photographs_to_a_service(with_wheel: Reader) -> None:
    bring_photographs(with_wheel)
    text = sections(README)
    said = with_wheel.follow(text["Your own data, in two commands"])
    assert '"label":"' in said
    said = with_wheel.follow(text["Three journeys"].split("**A table.**")[0])
    assert said.strip() in ("circle", "cross", "ring", "square")
    assert home_of(with_wheel) == []


@pytest.mark.process
def test_the_readme_serves_the_model_of_a_clone(finished: Project, tmp_path: Path) -> None:
    clone = copy_finished(finished, _made(tmp_path / "clone")).path
    follower = reader(clone, tmp_path / "home", Path("/usr/local/bin"))
    assert '"label":"' in follower.follow(sections(README)["Try it"])
    assert home_of(follower) == []


@pytest.mark.parametrize("which", ["with_wheel", "with_clone"])
@pytest.mark.nightly(seconds=200)
@pytest.mark.timeout(1800)
def test_the_readme_leads_from_a_table_to_a_service(
    request: pytest.FixtureRequest, which: str
) -> None:
    follower: Reader = request.getfixturevalue(which)
    if which == "with_clone":
        follower.run("cd ../clone")
        follower.folder = follower.place()
    else:
        shutil.copytree(ROOT / "data/demo", follower.folder / "data/demo")
    bring_photographs(follower)
    text = sections(README)
    own, table = text["Your own data, in two commands"], text["Three journeys"]
    assert '"label":"1"' in follower.follow(own + table)


@pytest.mark.parametrize("which", ["with_wheel", "with_clone"])
@pytest.mark.parametrize(
    "page", [path for path in TUTORIALS if ".zh" not in path.name], ids=lambda page: page.stem
)
@pytest.mark.nightly(seconds=450)
@pytest.mark.timeout(1800)
def test_a_tutorial_prints_what_it_shows(
    request: pytest.FixtureRequest, page: Path, which: str
) -> None:
    follower: Reader = request.getfixturevalue(which)
    said = follower.follow(page.read_text())
    assert "certified" in said
    assert home_of(follower) == []


def bring_a_panel(reader: Reader) -> None:
    rows = [
        f"{country},{year},{gdp + year},{life + year / 100}"
        for gdp, (country, life) in enumerate(zip("ABCDEFGH", range(60, 76, 2), strict=True))
        for year in range(1990, 2020, 2)
    ]
    (reader.folder / "life.csv").write_text("\n".join(["Country,Year,gdp,life", *rows]) + "\n")
    bring_photographs(reader)


def make_a_project_of_pictures(reader: Reader) -> None:
    bring_photographs(reader)
    shutil.copytree(reader.folder / "photographs/ring", reader.folder / "pictures")
    make = "slipway init my_project --data photographs/; cd my_project; slipway run"
    reader.run(f"({make.replace(';', ' &&')})")


def make_a_project_of_a_table(reader: Reader) -> None:
    table = ROOT / "data/demo/wine.csv"
    kind = "--target cultivar --task table_classification"
    reader.run(f"slipway init wines --data {table} {kind}\ncd wines")


def make_a_small_search(reader: Reader) -> None:
    make_a_project_of_a_table(reader)
    reader.run("slipway set search.budget.trials=4 search.halving=null train.epochs=8")


def make_packed_rows(reader: Reader) -> None:
    make_a_project_of_a_table(reader)
    reader.run("slipway run augment")


# The how-tos that are followed, and what their readers have before.
FOLLOWED = {
    "experiments": make_a_project_of_a_table,
    "loggers": make_a_project_of_a_table,
    "new_project": bring_a_panel,
    "plan": make_packed_rows,
    "predict": make_a_project_of_pictures,
    "profile": make_packed_rows,
    "search": make_a_small_search,
    "trees": make_a_project_of_a_table,
}
# The others with commands or code, and why they are not. Their rules have tests of their own.
NOT_FOLLOWED = {
    "ci": "needs a remote, a registry and kubectl; tests/launch runs the steps of the CI files",
    "collect": "needs logged requests; tests/end_to_end/test_loop.py has them",
    "encoders": "needs an encoder of 83 MB; tests/end_to_end/test_encoders.py makes a small one",
    "ensembles": "its command needs a search; the tutorial about a better model has one",
    "erase": "needs a service that recorded groups; tests/curation has one",
    "export_browser": "needs a browser; tests/export/targets has one",
    "export_edge": "builds an environment from an index; tests/export/targets does, too",
    "export_kserve": "needs a cluster",
    "export_openvino": "needs an environment of its own; tests/export/targets has one where it is",
    "export_triton": "needs a server in a container",
    "gpu_machine": "needs a GPU",
    "hand_over": "publishes on a hub; tests/end_to_end/test_released_remote.py has a folder",
    "installation": "installs packages; `make demo` and `make release` do",
    "label": "serves a page until a person ends it; tests/curation asks it",
    "label_issues": "a person decides between its steps",
    "loop": "needs a service under drift; tests/end_to_end/test_loop.py has one",
    "operations": "needs Prometheus, PostgreSQL or a cluster; tests/monitoring has the first",
    "own_network": "has code without commands; tests/end_to_end/test_user_code.py trains such code",
    "pretrained": "what it shows depends on the reader's photographs; tests/project has some",
    "remote_data": "needs stores; tests/end_to_end/test_remote_data.py has folders",
    "replay": "names a request of its author; tests/replay logs one",
    "rollout": "needs requests while it works; tests/serving/rollout sends them",
    "scaling": "needs several machines; tests/training/distributed has several processes",
    "see_requests": "needs a collector of traces; tests/serving/tracing has one",
    "several_models": "needs several projects; tests/serving/gateway has them",
    "texts": "its request needs a service of texts; the tutorial about texts has one",
    "two_projects": "writes into the home folder",
    "video": "needs videos; tests/data/test_video.py runs its code",
}


@pytest.mark.parametrize("name", FOLLOWED)
@pytest.mark.nightly(seconds=200)
@pytest.mark.timeout(1800)
def test_a_how_to_prints_what_it_shows(with_wheel: Reader, name: str) -> None:
    FOLLOWED[name](with_wheel)
    start = with_wheel.place()
    for section in sections(ROOT / f"docs/how-to/{name}.md").values():
        with_wheel.run(f"cd {start}")  # a section is a task of its own
        with_wheel.follow(section)
    assert home_of(with_wheel) == []


def test_every_how_to_with_commands_is_followed_or_has_a_reason() -> None:
    names = {page.stem for page in HOW_TOS if ".zh" not in page.name and commands(page)}
    assert sorted([*FOLLOWED, *NOT_FOLLOWED]) == sorted(names)


@pytest.mark.parametrize(
    "page", [README, *(ROOT / "docs").glob("*/*.md")], ids=lambda page: page.stem
)
def test_a_translated_page_has_the_commands_of_the_page(page: Path) -> None:
    translated = page.with_suffix(".zh.md")
    if translated.exists():
        assert commands(translated) == commands(page) != []


def commands(page: Path) -> list[str]:
    """Return code and output of a page, without comments, which may be translated."""
    code = (block.text for block in blocks_of(page.read_text()) if block.language in CODE)
    return [re.sub(r" *# .*", "", text) for text in code]


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.name)
def test_every_picture_of_a_tutorial_exists_and_is_small(page: Path) -> None:
    pictures = [page.parent / name for name in PICTURE.findall(page.read_text())]
    assert pictures
    for picture in pictures:
        assert 5_000 < picture.stat().st_size < LARGEST_PICTURE, picture


def test_shown_output_is_found_apart_from_numbers_and_line_ends() -> None:
    said = "torch   cpu  0.9962\nonnx  cpu  1.3 MB  4.2e-07\nnow:\n  gates: 1 of 1\n  passed"
    assert missing("torch cpu 0.91\n...\ngates: 2 of 2 passed\n", said) == []
    assert missing("onnx cpu 687.6 kB 0.0e+00", said) == []


def test_invented_and_misplaced_output_is_reported() -> None:
    said = "torch cpu 1\nonnx cpu 2"
    assert missing("onnx cpu 1\ntorch cpu 1", said) == ["torch cpu #"]
    assert missing("torch gpu 1", said) == ["torch gpu #"]


def test_a_failing_command_and_an_invented_output_end_a_page(tmp_path: Path) -> None:
    follower = reader(tmp_path / "work", tmp_path / "home", Path(sys.prefix) / "bin")
    assert follower.follow("only words") == ""
    follower.follow("```bash\nmkdir sub\ncd sub\nexport WORD=kept\n```")
    follower.follow("```bash\nls ../sub && echo $WORD\n```\n\n```\nkept\n```")
    with pytest.raises(AssertionError, match="shown, but not printed"):
        follower.follow("```bash\necho right\n```\n\n```\nwrong\n```")
    with pytest.raises(AssertionError, match="no-such-command"):
        follower.follow("1. Type:\n\n   ```bash\n   no-such-command\n   ```")
    with pytest.raises(AssertionError, match="ModuleNotFoundError"):
        follower.follow("```python\nimport no_such_module\n```")
