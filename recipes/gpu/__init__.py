"""Checks that `gpu_check.py` runs, of training, stream synchronization, features on several ranks, and speed."""
