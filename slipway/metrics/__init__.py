"""Metrics with intervals, in float64 on numpy only; the trivial baseline; uncertainty fitting."""
