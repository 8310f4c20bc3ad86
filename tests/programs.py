"""Python programs for tests, forked from a process that has imported Lightning: in a tenth of a second, not in five.

    done = run_program("recipes/train.py", "trainer.max_epochs=1", cwd=ROOT)      # as `python recipes/train.py ...`
    done = run_program("-m", "torch.distributed.run", "script.py", cwd=tmp_path)  # as `python -m ...`

All else is as in a fresh process: its own session, arguments, environment, working directory and streams. Only what
torch and Lightning read when they are imported was read before.
"""

import atexit
import ctypes
import os
import runpy
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired

from tests.rank_pool import warm_context


def run_program(
    *arguments: str,
    cwd: str | Path = ".",
    env: Mapping[str, str] | None = None,
    timeout_s: float = 180.0,
    is_finalized: bool = False,
) -> CompletedProcess[str]:
    """Run ``python *arguments`` to its end: its exit code, and what it wrote.

    ``env``: its whole environment; by default this process's. ``is_finalized``: the interpreter takes itself apart at
    the end, which costs a second; by default it ends after the functions registered with ``atexit``.
    """
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("stdout", "stderr")]
        process = warm_context().Process(
            target=_become,
            args=(
                arguments,
                str(cwd),
                dict(os.environ if env is None else env),
                streams,
                is_finalized,
            ),
        )
        process.start()
        process.join(timeout_s)
        is_late = process.exitcode is None
        with suppress(ProcessLookupError):  # its session: what it started and left goes too
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()
        told = [path.read_text(errors="replace") if path.exists() else "" for path in streams]
        if is_late:
            raise TimeoutExpired(arguments, timeout_s, *told)
        return CompletedProcess(arguments, process.exitcode or 0, *told)


def _become(
    arguments: Sequence[str],
    cwd: str,
    environment: dict[str, str],
    streams: Sequence[Path],
    is_finalized: bool,
) -> None:
    os.setsid()
    for number, path in enumerate(streams, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    code = _code_of(arguments)
    if is_finalized:
        ctypes.pythonapi.Py_Exit(code)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _code_of(arguments: Sequence[str]) -> int:
    try:
        if arguments[0] == "-m":
            sys.argv = list(arguments[1:])
            sys.path[0] = os.getcwd()
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(arguments)
            sys.path[0] = str(Path(arguments[0]).resolve().parent)
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, int | None):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
