"""Without the packages of the extra `projects` its modules are not imported; its tests skip with the reason."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("lightly") is not None else ["methods.py"]
