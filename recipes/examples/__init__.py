"""Complete example programs that you can copy.

The folder also contains a notebook.
"""
