"""One file per question; each prints one table and writes it to results/ with hardware, versions, n and spread."""
