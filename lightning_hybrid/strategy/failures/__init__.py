"""Reports of errors that name the rank and the cause on every rank, and in the files of launchers."""
