"""params.yaml, typed: sections, checks, seals of stages, and edits that keep its comments.

No defaults: every value is in params.yaml.
"""
