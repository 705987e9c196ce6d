"""Finds the one type of a column whose type differs between the files of a table.

Types are joined as pyarrow's permissive promotion joins them: null and text are text, int64 and
double are double. Dictionaries are read as what they hold. Where that rule has no answer, such as
for booleans beside numbers or dates beside text, the cells become text, as in joined sources.
"""

from collections.abc import Callable, Collection

import pyarrow as pa

_TEXTS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
_BYTES = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
# The types whose cells can be written as the text that a CSV has for them.
_WITH_TEXT = (
    *(*_TEXTS, pa.types.is_null, pa.types.is_boolean, pa.types.is_integer, pa.types.is_floating),
    *(pa.types.is_decimal, pa.types.is_date, pa.types.is_timestamp),
)


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of the cells: that of a dictionary's values, and one type for all text."""
    if pa.types.is_dictionary(kind):
        return plain_type(kind.value_type)
    return pa.string() if _is_any(kind, _TEXTS) else kind


def common_type(kinds: Collection[pa.DataType]) -> pa.DataType | None:
    """Return the type that a column of several types is read as, or None if there is none."""
    plain = {plain_type(kind): None for kind in kinds}
    if len(plain) == 1:
        return next(iter(plain))
    if all(_is_any(kind, _WITH_TEXT) for kind in plain):
        return _promoted(plain) or pa.string()
    has_text = any(_is_any(kind, _TEXTS) for kind in plain)
    has_bytes = any(_is_any(kind, _BYTES) for kind in plain)
    return None if has_text and has_bytes else _promoted(plain)


def _promoted(kinds: Collection[pa.DataType]) -> pa.DataType | None:
    schemas = [pa.schema([("cells", kind)]) for kind in kinds]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive").field("cells").type
    except pa.ArrowException:
        return None


def _is_any(kind: pa.DataType, tests: Collection[Callable[[pa.DataType], bool]]) -> bool:
    return any(test(kind) for test in tests)
