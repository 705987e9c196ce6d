"""Data drift: compares live traffic with a reference stored in the bundle, on numpy only.

The service adds traffic to windows; `slipway/export/drift_reference.py` chooses the reference rows.
"""
