"""Strategies, launchers and processes: one or many, and what happens when one fails."""
