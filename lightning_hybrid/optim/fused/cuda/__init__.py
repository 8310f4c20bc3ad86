"""Fused steps on CUDA, with Triton kernels. Importing its modules requires Triton."""
