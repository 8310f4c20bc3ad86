"""Measurements of links and all-reduces, and a cluster description fitted to them."""
