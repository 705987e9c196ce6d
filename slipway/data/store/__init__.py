"""The packed store: memory-mappable arrays of one split, and how they are written."""
