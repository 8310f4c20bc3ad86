"""Programs that only maintainers run. Each writes a record: `python -m tests.evidence.<name>`."""

import os

# Set before torch is imported, unless it is already set: two threads in each of several processes are slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
