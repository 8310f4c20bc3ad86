"""Failure handling, which raises an error on all ranks that names the failed rank."""
