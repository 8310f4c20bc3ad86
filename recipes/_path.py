"""First import of every command: puts `recipes`, which is not installed, on the path; sets one thread per process.

Python puts the folder of a script first on its path: the commands find this module there.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# Before torch is imported: ranks, trials and workers share the cores, each with one thread. A value that is set stays.
os.environ.setdefault("OMP_NUM_THREADS", "1")
