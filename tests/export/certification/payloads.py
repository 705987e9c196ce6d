"""Converts raw samples and rows to the payloads that a client sends."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from slipway.data.sources.samples import RawSample, image_id
from slipway.data.tables.source import json_row
from slipway.export.certification.http_hop import RowPayload, payloads_of
from slipway.export.certification.measurement import TestRows


def original_payloads(samples: Iterable[RawSample], rows: TestRows) -> Iterator[RowPayload]:
    found = ((sample.source, image_id(sample), sample.payload) for sample in samples)
    return payloads_of(found, rows, "application/octet-stream")


def row_payloads(
    raw: Iterable[tuple[str, str, Mapping[str, Any]]], rows: TestRows
) -> Iterator[RowPayload]:
    found = ((source, row_id, json_row(row)) for source, row_id, row in raw)
    return payloads_of(found, rows, "application/json")
