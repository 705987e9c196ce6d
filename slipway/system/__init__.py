"""Files, errors, typed records, cores and memory: what every other room stands on."""
