"""Datasets of the recipes, and packing of datasets into shards."""
