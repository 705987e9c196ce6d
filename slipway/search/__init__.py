"""`slipway search`: space, proposals, schedule, journal, trials outside the workspace, report.

A trial itself is `dvc repro train`: training is independent of searches.
"""
