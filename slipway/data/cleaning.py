"""Cleaning: every image is decoded in full, and what cannot be used is refused under the name of a rule.

Nothing is repaired, relabelled or dropped in silence: kept + quarantined == read. The result depends on the content of the
data, not on the order of files or the number of workers.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from slipway import files
from slipway.contract import Task, is_classification
from slipway.data.parallel import ordered_map
from slipway.data.rows import QUARANTINE, ROWS
from slipway.data.samples import Fault, RawSample
from slipway.errors import DataError, ImageError
from slipway.params import CleanParams
from slipway.preprocess import decode_image

RULES = {
    "missing_file": "the path leads to no file",
    "outside_folder": "the path leads out of the table's folder",
    "unreadable": "the file system does not give the bytes",
    "missing_image": "the image column is empty",
    "malformed_row": "the row has too many or too few columns",
    "missing_label": "no class",
    "missing_target": "no number",
    "not_a_number": "a target that is not a number",
    "non_finite_target": "a target that is infinite or NaN",
    "missing_group": "no group, though data.group_column is set",
    "empty": "an image of 0 bytes",
    "undecodable": "not an image of a known format, whatever its name says",
    "truncated": "an image that breaks off or is damaged",
    "pixel_bomb": "more pixels than clean.max_pixels",
    "too_small": "a side shorter than clean.min_side_px",
    "conflicting_label": "the same picture under different classes; all of them are refused",
    "conflicting_target": "the same picture with different numbers; all of them are refused",
    "exact_duplicate": "the same picture again; one of them is kept",
}
_MAX_EXAMPLES = 20
_MAX_SHOWN = 3


@dataclass(frozen=True)
class Cleaned:
    """What is kept (`rows.ROWS`, by id), what is refused (`rows.QUARANTINE`, by rule and source), and how many were read."""

    rows: pa.Table
    quarantine: pa.Table
    num_read: int

    @property
    def num_bad(self) -> int:
        """The refused samples without the duplicates."""
        return sum(severity == "error" for severity in self.quarantine["severity"].to_pylist())


@dataclass(frozen=True)
class Inspected:
    """A sample after decoding: its facts, or the fault under which it is refused."""

    source: str
    label: str | None
    target: float | None
    group: str | None
    fault: Fault | None
    width: int = 0
    height: int = 0
    num_bytes: int = 0
    sha256: str = ""
    pixels: bytes = b""  # digest of mode, size and pixels

    @property
    def order(self) -> tuple[str, str, str]:
        return (self.sha256, self.group or "", self.source)


def clean_samples(samples: Iterable[RawSample], params: CleanParams, num_workers: int) -> Iterator[Inspected]:
    """Decode and check each sample by itself, over `num_workers` processes (0: one per core), in order."""
    inspect = partial(_inspect, max_pixels=params.max_pixels, min_side_px=params.min_side_px)
    return ordered_map(inspect, samples, num_workers, lambda sample: len(sample.payload))


def collect(inspected: Iterable[Inspected]) -> Cleaned:
    """Compare the samples with each other, and sort them into kept and refused."""
    everything = list(inspected)
    refused = [(sample, sample.fault) for sample in everything if sample.fault]
    kept: list[Inspected] = []
    readable = sorted((sample for sample in everything if not sample.fault), key=lambda sample: (sample.pixels, sample.order))
    for _, group in groupby(readable, key=lambda sample: sample.pixels):
        same = list(group)
        conflict = _conflict(same)
        if conflict:
            refused += [(sample, conflict) for sample in same]
            continue
        kept.append(same[0])
        refused += [(sample, Fault("exact_duplicate", f"the same picture as {same[0].source}")) for sample in same[1:]]
    if len(kept) + len(refused) != len(everything):
        raise AssertionError(f"{len(kept)} kept + {len(refused)} refused is not {len(everything)} read")
    return Cleaned(_rows(kept), _quarantine(refused), len(everything))


def check_usable(cleaned: Cleaned, params: CleanParams, task: Task) -> None:
    """DataError when too much was refused, or when what is left cannot teach anything."""
    if not cleaned.num_read:
        raise DataError("data.path holds no sample at all, expected images.")
    share = cleaned.num_bad / cleaned.num_read
    if share > params.max_bad_share:
        raise DataError(
            f"{cleaned.num_bad} of {cleaned.num_read} samples are bad, a share of {share:.4f}, "
            f"above clean.max_bad_share {params.max_bad_share}:\n{_listing(cleaned.quarantine)}\n"
            "Mend or remove them, or raise clean.max_bad_share."
        )
    if not cleaned.rows.num_rows:
        raise DataError(f"none of {cleaned.num_read} samples is left:\n{_listing(cleaned.quarantine)}\nMend them.")
    distinct = set(cleaned.rows["label" if is_classification(task) else "target"].to_pylist())
    if len(distinct) < 2:
        kind = "class" if is_classification(task) else "target"
        raise DataError(
            f"all {cleaned.rows.num_rows} kept samples have the {kind} {next(iter(distinct))!r}, expected at least two. "
            "Check data.path and data.target_column."
        )


def report(cleaned: Cleaned, task: Task) -> dict[str, Any]:
    """What `reports/clean.json` holds: counts, refusals by rule with examples, and what is left."""
    refused = {
        rule: {"count": len(rows), "severity": rows[0]["severity"], "meaning": RULES[rule], "examples": _examples(rows)}
        for rule, rows in _by_rule(cleaned.quarantine).items()
    }
    summary: dict[str, Any] = {"read": cleaned.num_read, "kept": cleaned.rows.num_rows, "refused": refused, "checks": sorted(RULES)}
    if is_classification(task):
        return summary | {"classes": dict(sorted(Counter(cleaned.rows["label"].to_pylist()).items()))}
    targets = cleaned.rows["target"].to_numpy()
    names = ("min", "p25", "median", "p75", "max")
    quantiles = {name: float(value) for name, value in zip(names, np.quantile(targets, [0, 0.25, 0.5, 0.75, 1]), strict=True)}
    return summary | {"target": quantiles | {"mean": float(targets.mean()), "std": float(targets.std())}}


def _inspect(sample: RawSample, max_pixels: int, min_side_px: int) -> Inspected:
    facts: dict[str, Any] = {}
    fault = sample.fault
    if fault is None:
        try:
            image = decode_image(sample.payload, max_pixels)
            facts = _facts(sample.payload, image)
            fault = _too_small(image, min_side_px)
        except ImageError as error:
            looks = f"; it looks like {looks_like(sample.payload)}" if error.rule == "undecodable" else ""
            fault = Fault(error.rule, error.detail + looks)
    return Inspected(sample.source, sample.label, sample.target, sample.group, fault, **facts)


def _facts(payload: bytes, image: Image.Image) -> dict[str, Any]:
    return {
        "width": image.width,
        "height": image.height,
        "num_bytes": len(payload),
        "sha256": files.sha256_bytes(payload),
        "pixels": _pixel_digest(image),
    }


def _pixel_digest(image: Image.Image) -> bytes:
    if image.mode in ("P", "PA") or image.has_transparency_data:  # palette indices alone do not tell the colours
        image = image.convert("RGBA")
    return hashlib.sha256(f"{image.mode} {image.size} ".encode() + image.tobytes()).digest()


def _too_small(image: Image.Image, min_side_px: int) -> Fault | None:
    if min(image.size) >= min_side_px:
        return None
    return Fault("too_small", f"{image.width}x{image.height} pixels, clean.min_side_px is {min_side_px}")


_SIGNATURES = {
    b"\xff\xd8\xff": "a JPEG whose header is damaged",
    b"\x89PNG": "a PNG whose header is damaged",
    b"RIFF": "a WebP whose header is damaged, or a sound",
    b"II*\0": "a TIFF whose header is damaged",
    b"MM\0*": "a TIFF whose header is damaged",
    b"GIF8": "a GIF image",
    b"%PDF": "a PDF document",
    b"PK\x03\x04": "a ZIP archive",
    b"\x1f\x8b": "a gzip archive",
    b"\x89HDF": "an HDF5 file",
    b"\x93NUMPY": "a NumPy array",
    b"\x00\x00\x01\x00": "an icon",
    b"8BPS": "a Photoshop file",
}


def looks_like(payload: bytes) -> str:
    """What bytes that are not a readable image may be instead."""
    for signature, name in _SIGNATURES.items():
        if payload.startswith(signature):
            return name
    if payload[4:8] == b"ftyp":
        return "a HEIC or AVIF image, or a film"
    head = payload[:64]
    if not head.strip(b"\0"):
        return "zero bytes"
    text = head.decode(errors="ignore")
    is_whole = len(text.encode()) >= len(head) - 3  # the last character may be cut
    if is_whole and all(character.isprintable() or character.isspace() for character in text):
        return f"text: {text[:24]!r}"
    return "binary data"


def _conflict(same: list[Inspected]) -> Fault | None:
    labels = sorted({sample.label for sample in same if sample.label is not None})
    targets = sorted({sample.target for sample in same if sample.target is not None})
    sources = ", ".join(sample.source for sample in same[:_MAX_SHOWN])
    if len(labels) > 1:
        return Fault("conflicting_label", f"the same picture as {', '.join(map(repr, labels))}: {sources}")
    if len(targets) > 1:
        return Fault("conflicting_target", f"the same picture with {', '.join(f'{target:g}' for target in targets)}: {sources}")
    return None


def _rows(kept: list[Inspected]) -> pa.Table:
    records: list[dict[str, Any]] = [
        {
            "id": sample.sha256[:32],
            "source": sample.source,
            "label": sample.label,
            "target": sample.target,
            "group": sample.group,
            "flags": [],
            "corrections": [],
            "width": sample.width,
            "height": sample.height,
            "bytes": sample.num_bytes,
            "sha256": sample.sha256,
        }
        for sample in sorted(kept, key=lambda sample: sample.sha256)
    ]
    return pa.Table.from_pylist(records, schema=ROWS)


def _quarantine(refused: list[tuple[Inspected, Fault]]) -> pa.Table:
    records = [
        {
            "source": sample.source,
            "rule": fault.rule,
            "detail": fault.detail,
            "severity": "duplicate" if fault.rule == "exact_duplicate" else "error",
        }
        for sample, fault in refused
    ]
    return pa.Table.from_pylist(sorted(records, key=lambda record: (record["rule"], record["source"])), schema=QUARANTINE)


def _by_rule(quarantine: pa.Table) -> dict[str, list[dict[str, str]]]:
    return {rule: list(rows) for rule, rows in groupby(quarantine.to_pylist(), key=lambda row: str(row["rule"]))}


def _examples(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{"source": row["source"], "detail": row["detail"]} for row in rows[:_MAX_EXAMPLES]]


def _listing(quarantine: pa.Table) -> str:
    lines = []
    for rule, rows in _by_rule(quarantine).items():
        lines.append(f"  {rule}: {len(rows)}" + (" (duplicates do not count as bad)" if rule == "exact_duplicate" else ""))
        lines += [f"    {row['source']}: {row['detail']}" for row in rows[:_MAX_SHOWN]]
    return "\n".join(lines)
