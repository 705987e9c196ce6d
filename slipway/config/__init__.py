"""params.yaml, typed: its sections, its checks, and edits that keep its comments."""
