"""A params.yaml of a former version becomes one of this version, with its comments."""

import copy
import re
from collections.abc import Callable, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from slipway.config.network_arguments import TabmArguments
from slipway.config.params import load_params, value_at
from slipway.config.yaml_files import as_plain_yaml
from slipway.kinds.inputs import COLUMNS, IMAGES
from slipway.system.errors import ParamsError
from slipway.upgrade.params import ParamsMigration, migrate
from slipway.upgrade.renames import table
from tests.project_params import of_kind

pytestmark = pytest.mark.unit
FORMER = (Path(__file__).parent / "version_0/params.yaml").read_text()
OF_0_1_0 = (Path(__file__).parent / "version_0/params_of_0.1.0.yaml").read_text()
OWN: dict[str, Any] = YAML(typ="safe", pure=True).load(Path("params.yaml"))
Migrated = Callable[[str], ParamsMigration]


@pytest.fixture
def migrated(tmp_path: Path) -> Migrated:
    """Migrate a text."""

    def run(text: str) -> ParamsMigration:
        path = tmp_path / "params.yaml"
        path.write_bytes(text.encode())
        return migrate(path)

    return run


def content_of(text: str) -> dict[str, Any]:
    content: dict[str, Any] = YAML(typ="safe", pure=True).load(text)
    return content


def comments(text: str) -> list[str]:
    return [line.partition(" # ")[2] for line in text.splitlines() if " # " in line]


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> ParamsMigration:
    path = tmp_path_factory.mktemp("former") / "params.yaml"
    path.write_text(FORMER)
    return migrate(path)


def test_the_former_file_becomes_one_that_this_version_reads(
    former: ParamsMigration, tmp_path: Path
) -> None:
    (tmp_path / "new.yaml").write_text(former.text)
    params = load_params(tmp_path / "new.yaml")
    assert params.version == table().to
    assert params.clean.outlier_mad_threshold == 8.0
    assert params.train.on_nonfinite == "fail"
    assert params.split.folds is None


def test_the_file_of_0_1_0_keeps_its_behaviour_and_its_comments(migrated: Migrated) -> None:
    after = migrated(OF_0_1_0)
    assert [text for text in comments(OF_0_1_0) if text not in comments(after.text)] == []
    rules = after.content["clean"]["rules"]
    refused = {name for name, action in rules.items() if action == "refuse"}
    assert refused == {"conflicting_label", "unknown_label", "too_small"}
    assert set(rules.values()) == {"refuse", None}
    assert after.content["split"]["assignment"] == "exact"
    assert after.content["augment"]["hue"] == 0.0
    assert after.content["train"]["network_arguments"]["stochastic_depth"] == 0.0
    assert "  rules: # refuse: quarantine the row;" in after.text
    assert "    too_small: refuse\n" in after.text


def test_an_argument_is_added_only_to_the_network_that_has_it(migrated: Migrated) -> None:
    text = re.sub("network: small_resnet.*", "network: timm/resnet18", OF_0_1_0)
    after = migrated(re.sub("network_arguments: .*", "network_arguments: {}", text))
    assert after.content["train"]["network_arguments"] == {}


def test_every_comment_and_every_line_without_an_old_name_is_kept(former: ParamsMigration) -> None:
    kept = comments(former.text)
    assert [text for text in comments(FORMER) if text not in kept] == []
    changed = set(FORMER.splitlines()) - set(former.text.splitlines())
    old = {key.rpartition(".")[2] for key in (*table().params, *table().params_value)}
    assert {line.split(":")[0].strip() for line in changed} <= old


def test_a_second_upgrade_changes_nothing(migrated: Migrated, former: ParamsMigration) -> None:
    twice = migrated(former.text)
    assert twice.text == former.text
    assert (twice.renamed, twice.replaced, twice.added) == ({}, {}, {})


def test_each_renamed_key_keeps_its_value_under_the_new_name(former: ParamsMigration) -> None:
    assert former.renamed == table().params
    for old, new in table().params.items():
        before = value_at(content_of(FORMER), old)
        assert value_at(former.content, old) is None
        after = value_at(former.content, new)
        assert after == table().params_value.get(new, {}).get(before, before)


def former_with(values: Mapping[str, object]) -> str:
    """The former file with other values, by the former names of keys."""
    section, wanted = "", dict(values)
    lines = FORMER.splitlines(keepends=True)
    for number, line in enumerate(lines):
        name = line.strip().partition(":")[0]
        if not line.startswith(" "):
            section = name
        elif line.strip().endswith("off") or name == "rules":
            section = f"{section}.rules"
        key = f"{section}.{name}"
        if key in wanted:
            lines[number] = f"{line.partition(':')[0]}: {wanted.pop(key)}\n"
    assert not wanted
    return "".join(lines)


def test_each_value_of_the_table_is_replaced(migrated: Migrated) -> None:
    old_names = {new: old for old, new in table().params.items()}
    replaced = {
        key.replace("*", "blurred"): change
        for key, values in table().params_value.items()
        for change in values.items()
    }
    after = migrated(
        former_with({old_names.get(key, key): old for key, (old, _) in replaced.items()})
    )
    for key, (_, new) in replaced.items():
        assert value_at(after.content, key) == new
        assert key in after.replaced


def dumped(content: dict[str, Any]) -> str:
    buffer = StringIO()
    YAML().dump(content, buffer)
    return buffer.getvalue()


def table_content() -> dict[str, Any]:
    content = of_kind(OWN, "table_classification")
    content["train"]["network"] = "tabm"
    content["train"]["network_arguments"] = content_of(TabmArguments.EXAMPLE)
    return content


@pytest.mark.parametrize("content", [OWN, table_content()], ids=["images", "table"])
def test_each_missing_key_of_the_table_is_added_with_its_value(
    migrated: Migrated, content: dict[str, Any]
) -> None:
    content = copy.deepcopy(content)
    own, other = (IMAGES, COLUMNS) if "blurred" in content["clean"]["rules"] else (COLUMNS, IMAGES)
    removed = {
        key: value
        for key, value in table().params_added.items()
        if (key not in other.settings or key in own.settings)
        and (own is IMAGES or not key.startswith("train.network_arguments."))
    }
    for key in removed:
        section, _, name = key.rpartition(".")
        del value_at(content, section)[name]
    for name in ("audit", "prune", "ensemble"):
        assert content.pop(name) == {}
    if not content["clean"]["rules"]:
        del content["clean"]["rules"]
    after = migrated(dumped(content))
    assert after.added == {key: as_plain_yaml(value) for key, value in removed.items()}
    found = content_of(after.text)
    assert {key: value_at(found, key) for key in removed} == removed


def test_a_missing_section_is_added_in_its_place_with_comments(migrated: Migrated) -> None:
    after = migrated(re.sub(r"(?ms)^prune: .*?(?=^export:)", "", FORMER))
    sections = list(content_of(FORMER))
    sections.insert(sections.index("evaluate"), "ensemble")
    assert list(content_of(after.text)) == ["version", *sections]
    assert "  kind: null # or structured (channels), magnitude (single weights)\n" in after.text


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_line_endings_and_sections_in_one_line_are_kept(migrated: Migrated, ending: str) -> None:
    in_one_line = "split: { train: 0.7, val: 0.15, test: 0.15, assignment: stable, "
    in_one_line += "'on_leak': fail, time_cuts: null, folds: 0, fold: 0 }\n\n"
    text = re.sub(r"(?ms)^split:.*?(?=^precompute:)", in_one_line, FORMER)
    after = migrated(text.replace("\n", ending)).text
    assert "folds: null, fold: 0 }" in after
    assert after.count("\n") == after.count(ending)


def refusal(migrated: Migrated, text: str) -> str:
    with pytest.raises(ParamsError) as raised:
        migrated(text)
    return str(raised.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (FORMER.replace("  fit: ", "  fitting: "), r"precompute\.fitting: unknown key"),
        (f"version: 99\n{FORMER}", r"version 99, this Slipway reads version 1 and older"),
        (f"version: new\n{FORMER}", r"version 'new', expected a whole number from 0 to 1"),
        (f"version: true\n{FORMER}", r"version true, expected a whole number"),
        (FORMER.replace("  digests: null", "  digests: null\n  checksums: null"), "expected one"),
        (FORMER.replace("seed: 7", "<<<<<<< HEAD\nseed: 7"), r"git checkout --ours params\.yaml"),
        (FORMER.replace("seed: 7", "seed: [7"), "not YAML"),
        (FORMER.replace("engine: local", "engine: cluster"), r"data\.engine: found 'cluster'"),
        ("- a list\n", "expected a mapping of sections"),
        (FORMER.replace("task: image_classification", "task: faces"), r"data\.task: found 'faces'"),
    ],
)
def test_a_params_yaml_with_unknown_or_contradictory_content_is_refused(
    migrated: Migrated, text: str, expected: str
) -> None:
    assert re.search(expected, refusal(migrated, text))


def test_anchors_are_refused_if_an_edit_would_change_two_places(migrated: Migrated) -> None:
    shared = FORMER.replace("class_weights: none", "class_weights: &off none").replace(
        "purpose: null", "purpose: *off"
    )
    assert "anchors" in refusal(migrated, shared)
