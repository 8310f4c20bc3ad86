"""Packing of image folders into shards."""
