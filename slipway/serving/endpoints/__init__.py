"""The endpoints of every service: `/predict`, probes, metrics, model info and status.

Models run in `slipway/serving/models/`; extensions bring endpoints of their own.
"""
