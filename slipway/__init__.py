"""Slipway's library: ring 0 in this folder, then `data`, `reports`, `training` and `export` (see docs/pipeline.md)."""
