"""Failure handling, which turns the failure of one rank into an error on all ranks that names it."""
