"""One file per question; each prints one table and writes it to bench/results/."""
