"""Sums between nodes in 8 or 4 bits an element: the same bits on every rank, and noise without bias."""
