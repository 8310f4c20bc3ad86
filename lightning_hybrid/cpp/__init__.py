"""Compilation and caching of C++ sources, which are compiled once per machine.

Each source has an equivalent in Python.
"""
