"""Tests of the gateway in front of several models."""
