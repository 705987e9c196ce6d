"""Runs a logged request through every backend again and reports where answers diverge.

Changes no model and no log.
"""
