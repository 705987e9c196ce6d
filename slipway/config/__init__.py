"""Reads params.yaml into typed sections, checks and edits it, and seals the inputs of stages.

No defaults: every value is in params.yaml.
"""
