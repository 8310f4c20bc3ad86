"""Checks of training, stream synchronisation, several ranks and speed, which `gpu_check.py` runs."""
