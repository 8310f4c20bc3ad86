"""Benchmarks of all-reduces, steps, updates and input; in each run the arms take turns."""
