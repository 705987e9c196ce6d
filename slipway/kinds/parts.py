"""The parts of a kind: functions and classes that are named in its record and imported on use.

A record names its parts as "package.module:name", so each layer imports only the parts that it
uses: the service never imports torch, and training on images imports no code for tables.
"""

import functools
import importlib
from typing import Any, Literal

# Layers must call `load_part` with a literal name, because code digests read the names from source.
InputPart = Literal[
    "contract",  # class: the input contract
    "check_source",  # data params -> DataError if the raw data or a named column is missing
    "clean",  # raw data -> kept and refused rows
    "merge",  # data params, collected rows, file, first recent row -> writes the merged data set
    "pack",  # split rows -> packed store
    "raw_rows",  # raw data -> each row in the form in which clients send it
    "network",  # NetworkSpec -> network
    "train_trees",  # job, network of trees, run log -> model; only kinds with trees
    "fit_trees",  # network of trees, seed, params, rows, threads -> fitted; only kinds with trees
    "early_spec",  # optional: params -> NetworkSpec without data, if params determine the shape
    "resize_rows",  # stored rows of another shape -> rows of the contract
    "input_features",  # contract -> drift features of the input
    "measure_features",  # rows -> values of the drift features
    "data_sections",  # optional: splits of a packed store -> sections of the data report
    "positions",  # contract -> positions of each column's values in a row; only for columns
    "row_cells",  # rows -> texts by column, for reports of inputs without pixels
    "receive",  # HTTP request -> payload
    "decoder",  # payload -> rows of the contract
    "api",  # class: describes the input of `/predict` for `/model`, OpenAPI and load tests
    "describe_tensors",  # contract -> input tensors of the Open Inference Protocol
    "read_tensors",  # input tensors of that protocol -> items of a payload
    "items",  # class: converts what Python callers pass into rows of the contract
    "source",  # contract, file or folder -> its rows, for predictions of files
    "explain",  # one row and its output -> the effect of each part of the row
]
# The parts of a target. Each class has the same methods in every kind.
TargetPart = Literal[
    "loss",  # class: losses and scores of rows in training
    "trees",  # optional, class: objective of boosted trees; their raw scores -> answers
    "head",  # class: answers of a network -> probabilities or values
    "scores",  # class: validated answers, whose metrics can be computed on any rows
    "results",  # class: the evaluation's results, from the outputs
    "sections",  # class: sections of the evaluation page
    "uncertainty",  # class: temperature, conformal thresholds and their use
]


@functools.cache
def import_part(path: str) -> Any:
    """Import the object at "package.module:name"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
