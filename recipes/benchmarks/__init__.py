"""Benchmarks of all-reduces and training steps, which measure all variants in alternating rounds."""
