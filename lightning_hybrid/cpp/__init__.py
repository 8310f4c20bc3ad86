"""Build and cache of C++ sources: compiled once per machine. Each has an equivalent in Python."""
