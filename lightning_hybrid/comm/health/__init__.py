"""Failure handling: the failure of one rank becomes the same error on all ranks, with the name of the rank."""
