"""Exact resume of a user's data loaders (`exact_resume=True`).

These modules determine the batch at which each loader continues. `data/exact_loader.py` moves the loaders there.
"""
