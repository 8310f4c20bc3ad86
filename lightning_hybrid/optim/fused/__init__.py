"""Fused optimizer steps for CPU and CUDA, which make only a few passes over memory."""
