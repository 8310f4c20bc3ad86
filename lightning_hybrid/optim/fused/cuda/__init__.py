"""The fused steps on CUDA: Triton kernels and their launches. Import needs Triton."""
