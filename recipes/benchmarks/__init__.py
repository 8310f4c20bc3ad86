"""Benchmarks of all-reduces and training steps. Each round measures every variant once."""
