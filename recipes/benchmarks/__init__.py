"""Benchmarks of all-reduces and training steps. In each round the variants take turns."""
