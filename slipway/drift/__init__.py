"""Data drift: compares live traffic with a reference stored in the bundle, on numpy only.

`serving/monitoring` adds traffic to windows; `slipway/export/drift.py` chooses reference rows.
"""
