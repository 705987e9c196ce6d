"""Where the time of a training step goes, and what would make it shorter."""
