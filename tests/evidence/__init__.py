"""Programs that only maintainers run. Each leaves a record: `python -m tests.evidence.<name>`."""

import os

# Before torch is imported: two threads in each of several processes are slower than one. A value that is set stays.
os.environ.setdefault("OMP_NUM_THREADS", "1")
