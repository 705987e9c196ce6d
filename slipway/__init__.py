"""Slipway's library, one room per folder; CONTRIBUTING.md has the picture of the rooms.

No module lives here directly. `stages/` and `serving/` use the library.
"""
