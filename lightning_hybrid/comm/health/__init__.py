"""Failure handling, which raises the same error on all ranks and names the rank at fault."""
