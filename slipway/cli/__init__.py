"""The command `slipway`: one module for each group of verbs, imported on use.

Verbs contain no logic: each reads its options and calls another package.
"""
