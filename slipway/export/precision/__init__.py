"""Which variant `auto` serves: speed, memory and loss of each on every provider, and the thresholds of its own."""
