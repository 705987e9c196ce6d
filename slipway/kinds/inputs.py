"""The kinds of input: one record for each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipway.kinds.parts import InputPart, import_part


@dataclass(frozen=True)
class InputKind:
    """A kind of input: facts that every layer may ask for, and the parts that only some need."""

    name: str  # `input.kind` of a bundle
    graph_input: str  # the name of the graph's input
    content_type: str  # of a request with one row
    many_per_request: bool  # a JSON object {"rows": [...]} may carry several rows
    has_pixels: bool  # a row is (height, width, channels) uint8, which reports show as a picture
    takes_files: bool  # a request may carry several rows as files of a form
    parts: Mapping[InputPart, str]

    def load_part(self, part: InputPart) -> Any:
        """Import a part. KeyError if this kind has no such part."""
        return import_part(self.parts[part])


IMAGES = InputKind(
    name="images",
    graph_input="image",
    content_type="application/octet-stream",
    many_per_request=False,
    has_pixels=True,
    takes_files=True,
    parts={
        "contract": "slipway.inputs.images:ImageContract",
        "clean": "slipway.data.images.clean_step:clean_images",
        "pack": "slipway.data.images.pack_step:pack_images",
        "raw_rows": "slipway.data.images.raw_rows:raw_rows",
        "network": "slipway.training.networks.image_networks:image_network",
        "resize_rows": "slipway.inputs.images:resize_rows",
        "input_features": "slipway.drift.image_features:image_features",
        "measure_features": "slipway.drift.image_features:measure_images",
        "receive": "serving.requests.reading:receive_images",
        "decoder": "serving.requests.decoding:ImageDecoder",
    },
)
COLUMNS = InputKind(
    name="columns",
    graph_input="row",
    content_type="application/json",
    many_per_request=True,
    has_pixels=False,
    takes_files=False,
    parts={
        "contract": "slipway.inputs.columns:ColumnContract",
        "clean": "slipway.data.tables.clean_step:clean_rows",
        "pack": "slipway.data.tables.pack_step:pack_rows",
        "raw_rows": "slipway.data.tables.source:raw_rows",
        "network": "slipway.training.networks.table_networks:table_network",
        "input_features": "slipway.drift.column_features:column_features",
        "measure_features": "slipway.drift.column_features:measure_columns",
        "row_cells": "slipway.reports.pages.cells:column_cells",
        "receive": "serving.requests.reading:receive_rows",
        "decoder": "serving.requests.rows:RowDecoder",
    },
)
