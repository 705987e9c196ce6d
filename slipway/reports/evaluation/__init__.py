"""The record of an evaluation: metrics, slices, gates, label issues, the comparison with the release."""
