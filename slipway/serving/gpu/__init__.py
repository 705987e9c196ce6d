"""GPU utilization, memory and temperature: an extension of the service."""
