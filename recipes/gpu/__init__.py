"""Checks of `gpu_check`: fits, waits of streams, several ranks, speed, the suite's GPU tests."""
