"""Metrics with intervals, the trivial baseline, and uncertainty fitting; float64, numpy only."""
