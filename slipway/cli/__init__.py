"""The command `slipway`: a module per group of verbs, imported on use.

No logic lives here: a verb reads its options and calls a room below.
"""
