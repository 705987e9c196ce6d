"""Hooks for Schemathesis that make valid requests, which the schemas alone do not describe.

Schemathesis loads this module by SCHEMATHESIS_HOOKS. SLIPWAY_TEST_KIND is the kind of the model:
images or rows.
"""

import base64
import os
from typing import Any

import schemathesis
from hypothesis import strategies as st

from tests.serving.bundles import ROW, picture

_SIZES = st.tuples(st.integers(1, 40), st.integers(1, 40))
_PICTURES = st.builds(picture, st.integers(0, 999), _SIZES)
_DATATYPES = {str: "BYTES", bool: "BOOL", float: "FP64", int: "FP64"}
_LIMIT = 1e9  # larger numbers do not fit in 32 bits once standardised

schemathesis.openapi.format("binary", _PICTURES)
for media_type in ("image/*", "application/octet-stream"):
    schemathesis.openapi.media_type(media_type, _PICTURES)


@schemathesis.hook
def map_case(context: schemathesis.HookContext, case: Any) -> Any:
    """Replace the bodies of valid cases by bodies that fit the model; keep invalid cases."""
    if case.meta and case.meta.generation.mode == schemathesis.GenerationMode.POSITIVE:
        if case.path.endswith("/infer"):
            case.body = {"inputs": _tensors()}
        elif case.path == "/feedback":
            # It uses request ids of earlier answers, all of which have an item 0.
            labels = case.body.get("feedback", [case.body])
            case.body = {"feedback": [label | {"item": 0} for label in labels]}
        elif isinstance(case.body, dict) and case.media_type == "application/json":
            case.body = _within_limit(case.body)
    return case


def _tensors() -> list[dict[str, Any]]:
    if os.environ["SLIPWAY_TEST_KIND"] == "images":
        image = base64.b64encode(picture()).decode()
        return [{"name": "image", "datatype": "BYTES", "shape": [1], "data": [image]}]
    return [
        {"name": name, "datatype": _DATATYPES[type(value)], "shape": [1], "data": [value]}
        for name, value in ROW.items()
    ]


def _within_limit(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: _within_limit(value) for name, value in content.items()}
    if isinstance(content, list):
        return [_within_limit(value) for value in content]
    return max(-_LIMIT, min(_LIMIT, content)) if isinstance(content, float) else content
