"""Tests of units: rows that groups and clusters link, along chains of any length."""

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from slipway.data.engine.rows import ROWS
from slipway.data.splits.units import connected_components, find_units
from tests.data.pictures import row

Edges = list[tuple[int, int]]


def by_search(num_nodes: int, edges: Edges) -> list[int]:
    """Return the components, found by a walk from each node."""
    neighbours: list[set[int]] = [set() for _ in range(num_nodes)]
    for one, other in edges:
        neighbours[one].add(other)
        neighbours[other].add(one)
    smallest = [-1] * num_nodes
    for start in range(num_nodes):
        waiting = [start] if smallest[start] < 0 else []
        while waiting:
            node = waiting.pop()
            if smallest[node] < 0:
                smallest[node] = start
                waiting.extend(neighbours[node])
    return smallest


@settings(deadline=None)
@given(
    st.integers(1, 40).flatmap(
        lambda n: st.tuples(
            st.just(n), st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)))
        )
    )
)
def test_connected_components_equal_those_of_a_simple_search(graph: tuple[int, Edges]) -> None:
    num_nodes, edges = graph
    left, right = (np.array([edge[side] for edge in edges], np.int64) for side in (0, 1))
    assert connected_components(num_nodes, left, right).tolist() == by_search(num_nodes, edges)


def test_a_long_chain_of_linked_rows_is_one_component() -> None:
    shuffled = np.random.default_rng(0).permutation(100_000)
    assert set(connected_components(100_000, shuffled[:-1], shuffled[1:]).tolist()) == {0}


def test_rows_linked_by_a_chain_of_groups_and_clusters_form_one_unit() -> None:
    rows = [
        {**row(1), "group": "a", "cluster": None},
        {**row(2), "group": "a", "cluster": "x"},
        {**row(3), "group": "b", "cluster": "x"},
        {**row(4), "group": "b", "cluster": "y"},
        {**row(5), "group": "c", "cluster": "y"},
        {**row(6), "group": "d", "cluster": None},
    ]
    units = find_units(pa.Table.from_pylist(rows, schema=ROWS), 7)
    assert len(set(units.of_row[:5].tolist())) == 1
    assert units.of_row[5] != units.of_row[0]
    assert sorted(units.sizes.tolist()) == [1, 5]


def test_rows_with_equal_content_form_one_unit() -> None:
    """If the rule for duplicates only flags, one picture is kept under two names."""
    units = find_units(
        pa.Table.from_pylist([row(1), {**row(1), "source": "again"}, row(2)], schema=ROWS), 7
    )
    assert units.of_row[0] == units.of_row[1] != units.of_row[2]


def test_rows_that_stay_together_get_the_same_key_if_their_clusters_are_renamed() -> None:
    """The name of a cluster is its smallest id, which may change when the cluster grows."""
    named = [
        [{**row(seed), "cluster": f"{name}{seed // 2}"} for seed in range(20)] for name in "xy"
    ]
    first, second = (find_units(pa.Table.from_pylist(rows, schema=ROWS), 7) for rows in named)
    assert first.keys[first.of_row].tolist() == second.keys[second.of_row].tolist()
