"""One file per DVC stage: its paths and its `run()`.

Nothing imports from here.
"""
