"""Turns the failure of one rank into the same error on all ranks, with the name of the rank."""
