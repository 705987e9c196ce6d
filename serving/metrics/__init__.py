"""Counters and histograms of the service, over all workers, for `/metrics`.

Judges nothing: drift and quality are in `serving/monitoring/`.
"""
