"""From raw files to the packed store: everything before torch."""
