"""Failure handling: the failure of one rank becomes an error on all ranks that names the failed rank."""
