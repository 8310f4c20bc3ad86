"""Report of a training run, with plots, an HTML page and a JSON summary."""
