"""The inference service. Imports ring 0 only, so torch never enters its process."""
