"""The choice of the variant that `auto` serves: speed, memory and loss of each on every provider, and the thresholds of its own."""
