"""Who may ask, how a connection and a request have to look, and how many get in."""
