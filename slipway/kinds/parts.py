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
    "clean",  # raw data -> kept and refused rows
    "pack",  # split rows -> packed store
    "raw_rows",  # raw data -> each row as a client sends it
    "network",  # NetworkSpec -> network
    "resize_rows",  # stored rows of another shape -> rows of the contract
    "input_features",  # contract -> drift features of the input
    "measure_features",  # rows -> values of these features
    "row_cells",  # rows -> texts by column, for reports of inputs without pixels
    "receive",  # HTTP request -> payload
    "decoder",  # payload -> rows of the contract
]


@functools.cache
def import_part(path: str) -> Any:
    """Import what "package.module:name" names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
