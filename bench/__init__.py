"""Benchmarks, one module for each question; each prints a table and writes it to bench/results/."""
