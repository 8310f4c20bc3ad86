"""Python programs for tests, forked from a process that has imported Lightning. They start in 0.1 s instead of 5 s.

    done = run_program("recipes/train.py", "trainer.max_epochs=1", cwd=ROOT)      # as `python recipes/train.py ...`
    done = run_program("-m", "torch.distributed.run", "script.py", cwd=tmp_path)  # as `python -m ...`

In all other respects the program runs as in a fresh process, with its own session, arguments, environment, working
directory and streams. The exception is what torch and Lightning read when they are imported: it comes from the parent.
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
    """Run ``python *arguments`` to its end and return its exit code and output.

    ``env`` is the complete environment of the program (default: the environment of this process). By default the
    program ends right after the functions registered with ``atexit``. With ``is_finalized=True`` the interpreter also
    finalizes, which takes a second.
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
        # end the session, including any processes that the program left behind
        with suppress(ProcessLookupError):
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
