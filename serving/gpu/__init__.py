"""GPU utilisation, memory and temperature: an extension of the service."""
