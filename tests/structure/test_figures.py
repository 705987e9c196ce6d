"""Each figure in the README equals the last measurement in bench/results/, to its digits."""

import re
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPEED, START, DATA, CLEANING, LOADING = (
    "serving_speed_small",
    "serving_start",
    "data_sets",
    "cleaning",
    "loading",
)
# The pattern in the README, the table, and the pattern there. Group 1 of each is the figure.
FIGURES = [
    (r"(\S+) times BentoML's", SPEED, r"\* (\S+) \([^)]*\) times BentoML"),
    (r"(\S+) times LitServe", SPEED, r"\* (\S+) \([^)]*\) times LitServe"),
    (r"(\S+ %) of an empty", SPEED, r"Slipway, one worker (?:\|[^|]*){2}\| (\S+)"),
    (r"two workers (\S+ %);", SPEED, r"Slipway, two workers (?:\|[^|]*){2}\| (\S+)"),
    (r"latency is (\S+) ms above", SPEED, r"one connection: (\S+) ms above"),
    (r"Service: start to ready.*?\| (\S+) s,", START, r"`/readyz` \| (\S+) s"),
    (r"Service: start to ready.*?\| \S+ s, (\S+) MB", START, r"resident, worker.*?\| (\S+) MB"),
    (r"CIFAR-10 .*?epochs .*?in (\S+) s", DATA, r"CIFAR-10 .*?\| (\d+) s \| \d+ s \|\n"),
    (r"CIFAR-10 .*?\| (\S+) \(", DATA, r"CIFAR-10 .*?accuracy (\S+)"),
    (r"California .*?epochs in (\S+) s", DATA, r"California .*?\| (\d+) s \| \d+ s \|\n"),
    (r"California .*?\| (\S+) \(", DATA, r"California .*?rmse (\S+)"),
    (r"California .*?\| \S+ \((\S+) to", DATA, r"California .*?rmse \S+ \((\S+) to"),
    (r"California .*?\| \S+ \(\S+ to (\S+)\)", DATA, r"California .*?rmse \S+ \(\S+ to (\S+)\)"),
    (
        r"\| (\S+ %) of the speed of libjpeg-turbo",
        CLEANING,
        r"clean over simplejpeg alone \| (\S+)",
    ),
    (r"on both cores, (\S+ %) of Pillow", CLEANING, r"clean over Pillow alone \| (\S+)"),
    (
        r"Training loader.*?\| (\S+) and",
        LOADING,
        r"## 224 px(?:.|\n)*?Slipway, in the trainer .*\| (\S+) \|",
    ),
    (
        r"Training loader.*?\| \S+ and (\S+) times",
        LOADING,
        r"### 28 px again(?:.|\n)*?Slipway, in the trainer .*\| (\S+) \|",
    ),
]


def figure(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found, pattern
    return found[1].replace(",", "")


def rounded(measured: str, as_said: str) -> Decimal:
    """A measured figure in the unit and to the digits of another."""
    value = Decimal(measured.removesuffix("%"))
    if as_said.endswith("%") and not measured.endswith("%"):
        value *= 100
    return value.quantize(Decimal(as_said.removesuffix("%").strip()), ROUND_HALF_UP)


@pytest.mark.parametrize(("said", "table", "measured"), FIGURES)
def test_a_figure_of_the_readme_is_the_measured_one(said: str, table: str, measured: str) -> None:
    in_readme = figure(said, (ROOT / "README.md").read_text())
    in_table = figure(measured, (ROOT / f"bench/results/{table}.md").read_text())
    assert Decimal(in_readme.removesuffix("%").strip()) == rounded(in_table, in_readme), in_table
