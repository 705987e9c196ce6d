"""A kept request once more through every hop, and where its model comes from."""
