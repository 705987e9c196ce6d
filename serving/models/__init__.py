"""Loaded models: sessions, batching, variant selection, admission."""
