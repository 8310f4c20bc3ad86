"""Complete programs to copy. The notebook is read in its folder."""
