"""`slipway search`: space, proposals, schedule, journal, trials beside the workspace, report.

A trial itself is `dvc repro train`: training knows nothing of searches.
"""
