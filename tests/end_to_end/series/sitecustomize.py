"""Registers a kind of task that Slipway does not have: rows of numbers in JSON Lines.

Python imports this module at its start in every process of the project.
"""

from slipway.kinds.inputs import InputKind
from slipway.kinds.registry import KINDS, TaskKind
from slipway.kinds.targets import NUMBER

SERIES = InputKind(
    name="series",
    graph_input="series",
    content_type="application/json",
    many_per_request=False,
    ids_from_cells=False,
    has_pixels=False,
    takes_files=False,
    networks={"series_mlp": "transforms.series:SeriesMlpArguments"},
    keys=(),
    endings=(".jsonl",),
    parts={
        "contract": "transforms.series:SeriesContract",
        "check_source": "transforms.series:check_series",
        "clean": "transforms.series:clean_series",
        "pack": "transforms.series:pack_series",
        "raw_rows": "transforms.series:raw_rows",
        "network": "transforms.series_network:series_network",
        "input_features": "transforms.series:input_features",
        "measure_features": "transforms.series:measure_features",
        "row_cells": "transforms.series:row_cells",
        "receive": "transforms.series_requests:receive_series",
        "decoder": "transforms.series_requests:SeriesDecoder",
        "api": "transforms.series_requests:SeriesApi",
        "describe_tensors": "transforms.series_requests:describe_tensors",
        "read_tensors": "transforms.series_requests:read_tensors",
    },
)
KINDS["series_regression"] = TaskKind("series_regression", SERIES, NUMBER)
