"""Build and cache of C++ sources, which are compiled once per machine. Each one has an equivalent in Python."""
