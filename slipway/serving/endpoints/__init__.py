"""The endpoints of the core: `/predict`, and those that report on the service.

Models run in `slipway/serving/models/`; extensions bring endpoints of their own.
"""
