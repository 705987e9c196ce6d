"""Metrics of the service, over all workers, for `/metrics`.

Drift and quality are in `slipway/serving/monitoring/`.
"""
