"""Collects the service's metrics over all workers, for `/metrics`.

Drift and quality are in `slipway/serving/monitoring/`.
"""
