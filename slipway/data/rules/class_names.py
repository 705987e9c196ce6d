"""Finds class names that are spellings of the same word.

Spellings differ in case, spaces, hyphens or Unicode form, or are whole numbers such as 1 and 1.0,
which one program writes for the other. Misspellings differ in a letter or two.
"""

import difflib
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Mapping

from slipway.config.yaml_text import as_yaml

_IMBALANCE = 10  # times as many rows in the largest class as in the smallest
_MAX_SHOWN = 5
_RARE_ROWS = 20  # a class with as many rows is no slip of the keyboard
_WHOLE = re.compile(r"([+-]?[0-9]+)\.0*")  # a whole number, as programs write a float
_MINUS = re.compile(r"(?<!\w)-(?=[0-9.])")  # -1 is another class than 1
_SEPARATORS = re.compile(r"[;,/|]")  # between names: such a name is a combination, no slip
_INVISIBLE = re.compile("[\u00ad\u200b\u2060\ufeff]")  # a soft hyphen, blanks without a width
_ALIKE = 0.8  # least ratio of `difflib`: "noo" and "no" have it, "cat" and "car" do not


def variants(counts: Mapping[str, int]) -> dict[str, str]:
    """Map each rarer spelling of a word to its most frequent spelling.

    `counts` is the number of rows by spelling.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for name in sorted(counts):
        folded = unicodedata.normalize("NFC", _INVISIBLE.sub("", name)).casefold()
        folded = _MINUS.sub(
            "\u2212", _WHOLE.sub(r"\1", folded) if _WHOLE.fullmatch(folded) else folded
        )
        groups[re.sub(r"[\s_-]+", " ", folded).strip()].append(name)
    meant: dict[str, str] = {}
    for names in groups.values():
        first = max(names, key=lambda name: (not _WHOLE.fullmatch(name), counts[name]))
        meant |= {name: first for name in names if name != first}
    return meant


def joined_counts(counts: Mapping[str, int]) -> Counter[str]:
    """Return the number of rows by class, with the spellings of `variants` joined."""
    meant = variants(counts)
    joined: Counter[str] = Counter()
    for name, rows in counts.items():
        joined[meant.get(name, name)] += rows
    return joined


def misspellings(counts: Mapping[str, int]) -> dict[str, str]:
    """Map each rare name to the most similar one, if that has ten times its rows.

    `counts` is the number of rows by class. Names with digits or separators are left out.
    """
    meant = {}
    names = [name for name in counts if not _SEPARATORS.search(name)]
    for name in names:
        rows = counts[name]
        if rows >= _RARE_ROWS or any(map(str.isdigit, name)):
            continue
        larger = [other for other in names if counts[other] >= _IMBALANCE * rows]
        if near := difflib.get_close_matches(name, larger, 1, _ALIKE):
            meant[name] = near[0]
    return meant


def class_hints(counts: Mapping[str, int], label_map: Mapping[str, str]) -> list[str]:
    """Return hints on classes that are probably the same, and on imbalance.

    `counts` is the number of rows by class.
    """
    hints = []
    if found := variants(counts):
        shown = listed_variants(found, counts)
        # The map is applied once, so its present values have to lead to the final name.
        mapped = {name: found.get(meant, meant) for name, meant in label_map.items()}
        hints.append(
            f"classes that differ only in spelling: {shown}. If they are one, put this under data "
            f"in params.yaml:\n  label_map: {as_yaml(mapped | found)}"
        )
    joined = {name: rows for name, rows in counts.items() if name not in found}
    if slips := misspellings(joined):
        mapped = {name: slips.get(meant, meant) for name, meant in label_map.items()}
        hints.append(
            f"classes that may be misspelt: {listed_variants(slips, counts)}. If they are, put "
            f"this under data in params.yaml:\n  label_map: {as_yaml(mapped | found | slips)}"
        )
    largest, smallest = (
        max(counts, key=lambda name: counts[name]),
        min(counts, key=counts.__getitem__),
    )
    if counts[largest] >= _IMBALANCE * counts[smallest]:
        hints.append(
            f"class imbalance: {largest!r} has {counts[largest]} of {sum(counts.values())} rows, "
            f"{smallest!r} has {counts[smallest]}. Accuracy hides small classes: look at f1_macro "
            "too, and try train.class_weights: balanced"
        )
    return hints


def listed_variants(found: Mapping[str, str], counts: Mapping[str, int]) -> str:
    """Return the first spellings with their row counts as text, and the number of the others."""
    shown = [
        f"{name!r} ({counts[name]} rows) and {meant!r} ({counts[meant]})"
        for name, meant in list(found.items())[:_MAX_SHOWN]
    ]
    more = f", and {len(found) - _MAX_SHOWN} more" if len(found) > _MAX_SHOWN else ""
    return ", ".join(shown) + more
