"""Packs image folders into shards."""
