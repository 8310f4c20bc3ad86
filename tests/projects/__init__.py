"""Other people's projects, by version: `pip install -e '.[test]'`, then the extra `projects`; all of it is `long`."""
