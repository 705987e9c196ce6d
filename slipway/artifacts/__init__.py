"""Files that one part writes and another reads, with their only readers and writers.

Bundle, certificate, engine manifest, golden rows, quality gates, uncertainty parameters. The drift
reference is in `slipway/drift/`.
"""
