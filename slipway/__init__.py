"""Slipway's library: ring 0 (`system` to `traffic`), then `data`, `reports`, `training` and `export` (see docs/pipeline.md)."""
