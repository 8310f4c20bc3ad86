"""Measurements of links and all-reduces, and the description of a cluster that fits them."""
