"""The modules of tests.reports.pages."""
