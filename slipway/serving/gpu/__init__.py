"""Reports GPU utilization, memory and temperature, as an extension of the service."""
