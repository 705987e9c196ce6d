"""Rules that refuse or flag rows, and the report of what they found."""
