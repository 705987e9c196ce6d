"""Work on single rows: people label logged rows, and the rows of one person are erased.

`slipway/data/erasure/` and `slipway/traffic/` search and change the files.
"""
