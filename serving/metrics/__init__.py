"""What the service counts and measures of itself, over all of its workers."""
