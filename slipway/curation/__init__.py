"""Single rows of the data: people label logged rows, and the rows of one person are erased.

Searching and changing the files themselves is done in `slipway/data/erasure/` and in `traffic`.
"""
