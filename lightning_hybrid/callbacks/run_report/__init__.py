"""Training-run report, with plots, an HTML page and a JSON summary."""
