"""`slipway search`: space, proposals, schedule, journal, trials outside the workspace, report.

A trial runs `dvc repro train` in a folder of its own; the training code does not know of searches.
"""
