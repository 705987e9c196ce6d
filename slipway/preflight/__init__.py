"""Refuses a project that cannot run on this machine, before any stage starts.

Each rule is the function that the stage itself calls.
"""
