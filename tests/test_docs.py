"""docs/params.md names every key of `slipway.params` and nothing else, and the stages that read it."""

import re
from pathlib import Path

import yaml
from pydantic import BaseModel

from slipway.params import Gate, Params, parse_params

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/params.md").read_text()


def declared_keys(model: type[BaseModel] = Params, place: str = "") -> set[str]:
    """Every key that can be written in params.yaml, as "section.key"."""
    keys = set()
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys |= declared_keys(field.annotation, f"{place}{name}.")
        else:
            keys.add(place + name)
    return keys


def documented_sections(page: str) -> dict[str, str]:
    """The text below each heading of the second level."""
    parts = re.split(r"^## (\w+)$", page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def documented_keys(page: str) -> set[str]:
    """The first column of every table, as "section.key"; the top-level `seed` is a section of its own."""
    keys = set()
    for section, text in documented_sections(page).items():
        for key in re.findall(r"^\| `([\w.]+)` \|", text, flags=re.MULTILINE):
            keys.add(key if key == section else f"{section}.{key}")
    return keys


def documented_readers(page: str) -> dict[str, set[str]]:
    """The stages of each section's "Read by" line."""
    found = {}
    for section, text in documented_sections(page).items():
        line = re.search(r"^Read by: (.+)$", text, flags=re.MULTILINE)
        found[section] = set(re.findall(r"`(\w+)`", line[1])) if line else set()
    return found


def actual_readers() -> dict[str, set[str]]:
    """The stages of dvc.yaml that name a section, or a key in it, among their params."""
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    readers: dict[str, set[str]] = {section: set() for section in Params.model_fields}
    for stage, content in stages.items():
        for key in content["params"]:
            readers[key.split(".")[0]].add(stage)
    return readers


def test_every_key_is_documented_and_nothing_else() -> None:
    gate_keys = {f"evaluate.gates.METRIC.{bound}" for bound in Gate.model_fields}
    assert documented_keys(PAGE) == declared_keys() | gate_keys


def test_a_missing_and_an_invented_key_would_be_seen() -> None:
    without = PAGE.replace("| `epochs` |", "| epochs |")
    assert declared_keys() - documented_keys(without) == {"train.epochs"}
    invented = PAGE.replace("| `epochs` |", "| `epochs` |\n| `epoch_size` |")
    assert "train.epoch_size" in documented_keys(invented) - declared_keys()


def test_the_stages_that_read_a_section_are_those_of_dvc_yaml() -> None:
    assert documented_readers(PAGE) == actual_readers()


def test_a_wrong_reader_would_be_seen() -> None:
    assert documented_readers(PAGE.replace("Read by: `split`\n", "Read by: `train`\n")) != actual_readers()


def test_the_block_for_tables_is_all_that_has_to_change() -> None:
    content, block = (yaml.safe_load(text) for text in ((ROOT / "params.yaml").read_text(), _first_block("docs/tables.md")))
    for section, changes in block.items():
        content[section] |= changes
    assert parse_params(content).data.path == "data/demo/wine.csv"


def _first_block(page: str) -> str:
    return (ROOT / page).read_text().split("```yaml\n")[1].split("```")[0]
