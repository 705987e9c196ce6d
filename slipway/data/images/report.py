"""The record of a cleaned set of images: `reports/clean.json`."""

import pyarrow as pa
import pyarrow.compute as pc

from slipway.config.sections import CleanParams, DataParams
from slipway.data.images.cleaning import Cleaned
from slipway.data.rules.report import (
    CleanReport,
    Clusters,
    RuleCount,
    class_counts,
    correction_counts,
    rule_counts,
    target_summary,
)
from slipway.data.rules.rules import IMAGE_RULES, images_not_checked
from slipway.kinds.registry import is_classification

_MAX_CLUSTERS = 8
_MAX_SHOWN = 4  # of one cluster


def image_report(cleaned: Cleaned, params: CleanParams, data: DataParams) -> CleanReport:
    """Return the record of a cleaned set of images."""
    is_class = is_classification(data.task)
    skipped = images_not_checked(data, params)
    rows = cleaned.rows
    return CleanReport(
        read=cleaned.num_read,
        kept=rows.num_rows,
        refused=_counts(cleaned.quarantine),
        flagged=_counts(cleaned.flagged),
        corrections=correction_counts(rows["corrections"]),
        classes=class_counts(rows["label"]) if is_class else None,
        target=None if is_class else target_summary(rows["target"].to_numpy()),
        checks=sorted(set(IMAGE_RULES) - set(skipped)),
        not_checked=dict(sorted(skipped.items())),
        columns=[],
        clusters=_clusters(rows)
        if params.rules.near_duplicate == "flag"
        else None,  # of what is refused no cluster is left
    )


def _counts(findings: pa.Table) -> dict[str, RuleCount]:
    return rule_counts(
        findings["rule"], findings["source"], findings["detail"], findings["severity"], IMAGE_RULES
    )


def _clusters(rows: pa.Table) -> Clusters:
    named = rows.select(["cluster", "source"]).filter(pc.is_valid(rows["cluster"]))
    sizes = (
        named.group_by("cluster")
        .aggregate([("source", "count")])
        .sort_by([("source_count", "descending"), ("cluster", "ascending")])
    )
    counts = sizes["source_count"]
    shown = [
        sorted(named.filter(pc.equal(named["cluster"], cluster))["source"].to_pylist())[:_MAX_SHOWN]
        for cluster in sizes["cluster"].slice(0, _MAX_CLUSTERS).to_pylist()
    ]
    return Clusters(
        count=len(counts),
        rows=named.num_rows,
        largest=counts[0].as_py() if len(counts) else 0,
        examples=shown,
    )
