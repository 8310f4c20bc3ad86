"""Complete programs to copy; the notebook is read in its folder."""
