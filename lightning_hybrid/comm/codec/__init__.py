"""Codec of sums between nodes, with 8 or 4 bits per element: the same bits on every rank, and unbiased noise."""
