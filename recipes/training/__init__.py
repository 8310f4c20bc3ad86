"""Training of the recipes: modules, callbacks, loggers, checkpoint resumption and comparison of runs."""
