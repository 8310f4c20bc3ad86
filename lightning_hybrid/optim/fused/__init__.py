"""Optimizer steps in few passes over memory, on the CPU and on CUDA."""
