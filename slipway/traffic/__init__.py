"""Logged requests and monitoring records, and the selection of logged rows for the next data set."""
