"""Content of `reports/split.json`: the splits, deviations from the request, and leaks."""

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from slipway.data.engine.rows import SPLITS
from slipway.data.rules.report import bin_counts
from slipway.data.splits.leakage import leak_report
from slipway.data.splits.split import Split, count_classes, count_rows

_NUM_BINS = 30  # bins of a histogram of the target


def report(split: Split, seed: int) -> dict[str, Any]:
    """Return the content of `reports/split.json`."""
    classes = count_classes(split.rows, several=split.several)
    missing = {name: _missing(classes, index) for index, name in enumerate(SPLITS)}
    return {
        "seed": seed,
        "way": split.way,
        "cut_from_train": ["val"] if split.val_is_cut else [],
        "cut_by_time": split.cut_by_time,
        "val_is_test": split.val_is_test,
        "splits": {name: _describe(split.rows, name, classes) for name in SPLITS},
        "fractions": None
        if split.fractions is None
        else dict(zip(SPLITS, split.fractions, strict=True)),
        "largest_deviation": _largest_deviation(split, classes),
        "classes_missing": {name: found for name, found in missing.items() if found},
        "units": {"number": len(split.unit_sizes), "largest": int(split.unit_sizes.max(initial=0))},
        "folds": _fold_counts(split.rows),
        "purged": split.purged.num_rows,
        "leaks": leak_report(split.leaks),
    }


def summary(report: dict[str, Any]) -> str:
    """Return the report in a few lines for the console."""
    counts = ", ".join(f"{name} {found['rows']}" for name, found in report["splits"].items())
    lines = [f"{counts} ({report['way']})"]
    if report["cut_from_train"]:
        latest = " by time (its latest rows)" if report["cut_by_time"] else ""
        cut = " and ".join(report["cut_from_train"])
        why = "since the given split has none"
        if report["val_is_test"]:
            why = "since the given val is the only split that is held out: it is test"
        lines.append(f"{cut} is cut from train{latest}, {why}")
    if report["purged"]:
        lines.append(
            f"purged {report['purged']} rows whose group or near duplicates reach a later split, "
            "see data/split/purged.parquet"
        )
    if report["leaks"]["rows"]:
        lines.append(
            f"leaked {report['leaks']['rows']} rows of val and test, marked; "
            "evaluate also measures without them"
        )
    lines += [f"suspected leak: {copy['finding']}" for copy in report.get("target_copies", [])]
    lines += [
        f"{name} lacks the classes {', '.join(found)}"
        for name, found in report["classes_missing"].items()
    ]
    return "\n".join(lines)


def _describe(table: pa.Table, name: str, classes: dict[str, list[int]]) -> dict[str, Any]:
    rows = table.filter(pc.equal(table["split"], name))
    described: dict[str, Any] = {
        "rows": rows.num_rows,
        "leaked": int(pc.sum(rows["leaked"]).as_py() or 0),
    }
    if classes:
        part = SPLITS.index(name)
        described["classes"] = {label: counts[part] for label, counts in classes.items()}
    else:
        targets, every = rows["target"].to_numpy(), table["target"].to_numpy()
        low, high = float(every.min()), float(every.max())
        described["target"] = {
            "mean": float(targets.mean()),
            "std": float(targets.std()),
            "low": low,  # lowest value over the rows of all splits, like `high`
            "high": high,
            "histogram": bin_counts(targets, _NUM_BINS, low, high),
        }
    return described


def _largest_deviation(split: Split, classes: dict[str, list[int]]) -> dict[str, Any] | None:
    if split.fractions is None:
        return None
    counts = classes or {"": list(count_rows(split.rows).values())}
    found: list[dict[str, Any]] = [
        {
            "class": label or None,
            "split": name,
            "rows": count,
            "requested": requested,
            "found": count / sum(of_class),
        }
        for label, of_class in counts.items()
        for name, requested, count in zip(SPLITS, split.fractions, of_class, strict=True)
    ]
    return max(found, key=lambda entry: abs(entry["found"] - entry["requested"]))


def _missing(classes: dict[str, list[int]], index: int) -> list[str]:
    return [label for label, counts in classes.items() if not counts[index]]


def _fold_counts(table: pa.Table) -> list[int]:
    counts = table.group_by("fold").aggregate([([], "count_all")]).sort_by("fold")
    return list(counts["count_all"].filter(pc.is_valid(counts["fold"])).to_pylist())
