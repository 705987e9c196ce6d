"""Moves the params and the pipeline of an older project to this version: `slipway upgrade`.

No stage runs here. `slipway/upgrade/renames.yaml` is the table of the changes.
"""
