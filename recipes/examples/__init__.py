"""Complete example programs to copy.

The folder also contains a notebook.
"""
