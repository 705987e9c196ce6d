"""The parts of a kind: functions and classes that its record names and that load on first use.

A record names its parts as "package.module:name", so that a layer imports only the parts it uses:
the service never imports torch, and training images imports no code for tables.
"""

import functools
import importlib
from typing import Any, Literal

# Each layer calls `load_part` with one of these names as a literal: code digests read them there.
InputPart = Literal[
    "contract",  # class: the input contract
    "check_source",  # data params -> DataError if the raw data or a named column is missing
    "clean",  # raw data -> kept and refused rows
    "merge",  # data params, collected rows, file -> a larger data set in that file
    "pack",  # split rows -> packed store
    "raw_rows",  # raw data -> each row as a client sends it
    "network",  # NetworkSpec -> network
    "train_trees",  # job, network of trees, run log -> model; only of kinds with trees
    "fit_trees",  # network of trees, seed, params, rows, threads -> fits the trees; as above
    "early_spec",  # params -> NetworkSpec before there is data; only if params fix the shape
    "resize_rows",  # stored rows of another shape -> rows of the contract
    "input_features",  # contract -> drift features of the input
    "measure_features",  # rows -> values of these features
    "data_sections",  # optional: splits of a packed store -> sections of the page of the data
    "positions",  # contract -> places of each column in a row; only of columns
    "row_cells",  # rows -> texts by column, for reports of inputs without pixels
    "receive",  # HTTP request -> payload
    "decoder",  # payload -> rows of the contract
    "api",  # class: the input of `/predict` for `/model`, OpenAPI and the load test
    "describe_tensors",  # contract -> input tensors of the Open Inference Protocol
    "read_tensors",  # these tensors -> items of a payload
    "items",  # class: reads what Python callers pass to rows of the contract
    "source",  # contract, file or folder -> its rows, for predictions of files
    "explain",  # one row and its output -> the effect of each part of the row
]
# The parts of a target. A class named here has the same methods in every kind.
TargetPart = Literal[
    "loss",  # class: losses and scores of rows in training
    "trees",  # optional, class: objective of boosted trees, and their sums -> answers
    "head",  # class: answers of a network -> probabilities or values
    "scores",  # class: answers that are scored over any choice of rows
    "results",  # class: what an evaluation reads from the outputs
    "sections",  # class: sections of the evaluation page
    "uncertainty",  # class: temperature, conformal thresholds and their use
]


@functools.cache
def import_part(path: str) -> Any:
    """Import the object at "package.module:name"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
