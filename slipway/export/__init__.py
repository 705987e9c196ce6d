"""A trained network as one bundle: graphs, the choice among them, the records beside them, and the release."""
