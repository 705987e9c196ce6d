"""What the service answers, one module for each group of paths."""
