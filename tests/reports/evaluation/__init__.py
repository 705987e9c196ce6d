"""The modules of tests.reports.evaluation."""
