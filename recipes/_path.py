"""Start-up code that every command imports first: it sets the import path, limits threads and reads the command line.

`recipes` is not installed as a package. Python puts the folder of a script first on its path, so the commands find this
module there.
"""

import gc
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
# Must run before torch is imported: ranks, trials and workers share the cores, with one thread each. A value that the
# user has set is not changed.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_program = Path(getattr(sys.modules["__main__"], "__file__", None) or "none").resolve()
if _program.stem == "simulate":
    gc.disable()  # Garbage collection would take a tenth of the time of `simulate`, which consists mostly of imports.
if _program.parent == ROOT / "recipes" and (ROOT / "conf" / f"{_program.stem}.yaml").exists():
    from recipes.cli import usage

    usage.refuse_missing_hydra(_program.stem)

    from recipes.cli import command_line

    command_line.read(_program.stem)
