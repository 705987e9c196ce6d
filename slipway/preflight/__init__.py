"""Refuses a project that cannot run here before any stage starts."""
