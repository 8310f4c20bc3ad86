"""Measures links and all-reduces, and fits the description of a cluster to them."""
