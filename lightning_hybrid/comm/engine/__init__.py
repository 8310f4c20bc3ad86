"""Carries buckets through the stages of an all-reduce, by threads on the CPU and by streams on CUDA."""
