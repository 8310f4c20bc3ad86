"""Tests with fixed versions of other projects, all marked `long`. Install the extra `projects` to run them.

Run `pip install -e '.[test]'` first, and then install the extra.
"""
