"""Checks of `gpu_check.py`: fits, stream synchronisation, several ranks and speed."""
