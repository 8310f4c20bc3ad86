"""Sources in C++: compiled once per machine, loaded by the paths that have a Python equivalent."""
