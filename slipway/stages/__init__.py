"""The DVC stages, one module for each: its paths and its `run()`.

No other module imports them.
"""
