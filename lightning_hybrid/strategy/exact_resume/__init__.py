"""Exact resume of a user's loaders, `exact_resume=True`: the batch at which each one continues.

`data/exact_loader.py` moves the loaders there.
"""
