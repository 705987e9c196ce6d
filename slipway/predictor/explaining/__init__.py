"""Explains an answer by running the model on changed copies of the input."""
