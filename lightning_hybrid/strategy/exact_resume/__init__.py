"""`exact_resume=True`: where a user's loaders go on after a resume; how they do is in `data/exact_loader.py`."""
