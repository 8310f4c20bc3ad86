"""Checks that `gpu_check.py` runs on GPUs: training, stream synchronisation, several ranks and speed."""
