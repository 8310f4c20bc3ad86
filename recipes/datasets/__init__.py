"""Datasets for the recipes, and the packing of datasets into shards."""
