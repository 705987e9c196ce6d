"""Bodies for a table's service, drawn by hypothesis: valid and nearly valid rows, JSON, bytes."""

import json

from hypothesis import strategies as st

from tests.serving.bundles import ROW

VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=8),
        st.sampled_from(["red", "Zürich", "2021-03-04"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
_NAMES = st.one_of(st.sampled_from([*ROW, "rows"]), st.text(max_size=6))
_ROWS = st.one_of(
    st.just(ROW),
    st.dictionaries(_NAMES, VALUES, max_size=8),
    st.dictionaries(st.sampled_from(list(ROW)), VALUES).map(lambda row: ROW | row),
)
BODIES = st.one_of(
    _ROWS.map(json.dumps).map(str.encode),
    st.lists(st.one_of(_ROWS, VALUES), max_size=5).map(
        lambda content: json.dumps({"rows": content}).encode()
    ),
    VALUES.map(json.dumps).map(str.encode),
    st.binary(max_size=60),
)
