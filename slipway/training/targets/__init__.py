"""Losses, scores and output functions of each kind of target; the kind's record names them."""
