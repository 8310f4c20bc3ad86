"""Search for hyper-parameters with Optuna, with trials in parallel processes."""
