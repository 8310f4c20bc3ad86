"""Asynchronous all-reduce engine, which runs stages in threads on the CPU and on streams on CUDA."""
