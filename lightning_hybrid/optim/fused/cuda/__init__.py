"""Fused optimizer steps on CUDA, written as Triton kernels.

Importing the modules of this package requires Triton.
"""
