"""Failure handling: an error on all ranks that names the rank at fault."""
