"""Refuses a project that cannot run here, before any stage starts.

Each rule is the function that the stage itself calls.
"""
