"""Training code of the recipes: modules, callbacks, loggers, resuming and comparison of runs."""
