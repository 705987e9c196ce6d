"""HTML pages that open without internet, with their charts and tables.

Nothing is measured here.
"""
