"""params.yaml, typed: sections, checks, sealing, and edits that keep its comments.

No defaults: every value is in params.yaml.
"""
