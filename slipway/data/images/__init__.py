"""Cleaning of images: inspection, quality, and exact and near duplicates.

Tables are cleaned in `data/tables/`.
"""
