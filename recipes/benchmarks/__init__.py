"""Benchmarks of all-reduces, steps, updates and input. In each run the arms take turns."""
