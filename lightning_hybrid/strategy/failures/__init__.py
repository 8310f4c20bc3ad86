"""How a run ends with an error: reports that name rank and cause on every rank and in the files of launchers."""
