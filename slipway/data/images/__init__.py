"""Cleaning of images: inspection, quality, exact and near duplicates."""
