"""The endpoints of the core: `/predict`, and reports on the service.

Models run in `slipway/serving/models/`; extensions bring endpoints of their own.
"""
