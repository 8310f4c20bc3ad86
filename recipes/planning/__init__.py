"""What `simulate` and `tune` need: layers, scenarios, reports."""
