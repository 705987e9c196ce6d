"""Networks and how they are trained, on one process or many."""
