"""The first import of every command: finds `recipes`, which is not installed, and gives each process one thread.

Python puts the folder of a script first on its path, so the commands find this module and nothing else of ours.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# Before torch is imported: ranks, trials and workers share the cores, each with one thread. A value that is set stays.
os.environ.setdefault("OMP_NUM_THREADS", "1")
