"""Engine that passes buckets through the stages of an all-reduce, on threads on the CPU and on streams on CUDA."""
