"""Runs the served model: batching, admission, observers. Knows nothing of HTTP bodies.

`slipway/predictor/` loads models and builds their answers.
"""
