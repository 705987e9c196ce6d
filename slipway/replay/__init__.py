"""Runs a logged request on every backend again, and reports the backends that diverge.

Changes no model and no log.
"""
