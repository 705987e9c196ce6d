"""`slipway search`: proposes trials, schedules them, runs them, and writes journal and report.

A trial runs `dvc repro train` in a separate folder, with the same training code as any run.
"""
