"""Fused optimizer steps, which make few passes over memory, for the CPU and CUDA."""
