"""Assignment of rows to training, validation and test, and the search for leakage."""
