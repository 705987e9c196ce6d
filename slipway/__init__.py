"""Slipway's library: ring 0 in this folder, then `data`, `training` and `export` (see docs/pipeline.md)."""
