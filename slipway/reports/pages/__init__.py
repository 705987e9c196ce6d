"""HTML pages that open without internet, and the charts and tables in them. Nothing is measured here."""
