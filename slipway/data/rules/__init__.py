"""Rules that refuse or flag rows, and the report of their findings.

The checks themselves are in `data/images/` and `data/tables/`.
"""
