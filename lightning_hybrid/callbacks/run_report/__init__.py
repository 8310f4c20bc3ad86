"""Report of a run: pictures, a page and a summary."""
