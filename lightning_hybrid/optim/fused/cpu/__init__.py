"""Fused optimizer steps on the CPU, written in C++.

The system's compiler builds them once per machine, and `ctypes` calls them.
"""
