"""Fused steps on the CPU, in C++. The system's compiler builds them once per machine, and `ctypes` calls them."""
