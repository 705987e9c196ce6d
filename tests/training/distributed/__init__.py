"""Tests of strategies, launchers, failures and stop signals."""
