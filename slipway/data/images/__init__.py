"""Cleaning of images: inspection, quality, exact and near duplicates.

Tables are cleaned in `data/tables/`.
"""
