"""Other people's projects, by version: `pip install -e '.[test]'`, then the extra `projects`. All of it is `long`."""
