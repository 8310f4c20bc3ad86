"""Compilation, caching and loading of C++ functions, which run without Python's interpreter lock."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_hybrid.atomic_file import atomic_path

# -ffast-math is not used, because inf and nan must be detected. The last two flags only state that square roots do not
# set errno and that comparisons do not trap.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-Wno-psabi",
    "-fno-math-errno",
    "-fno-trapping-math",
)
_NATIVE = "-march=native"
FLOAT_BITS = Path(__file__).with_name("float_bits.h")  # header that all sources include

# Types of the arguments of C functions.
ADDRESS = ctypes.c_void_p
COUNT = ctypes.c_int64


class CannotBuildError(RuntimeError):
    """Error raised when no C++ compiler is installed or compilation fails.

    The message is inserted into a warning.
    """


@dataclass(frozen=True, kw_only=True)
class CppSource:
    """C++ source files with the signatures of the C functions that they define.

    Args:
        files: Source files. The first one is compiled, and it includes the others.
        functions: Argument types of each C function, by name. The functions return nothing.
    """

    files: tuple[Path, ...]
    functions: Mapping[str, tuple[type, ...]]

    def library(self) -> ctypes.CDLL:
        """Load the compiled functions from the user's cache, and compile them first if they are missing.

        Compilation takes a few seconds.

        Raises:
            CannotBuildError: There is no compiler, or it fails.
        """
        compiler = find_compiler()
        # Some compilers cannot detect the processor, so the flag is optional.
        with suppress(CannotBuildError):
            return self.load(compiler, (*FLAGS, _NATIVE), cache_dir())
        return self.load(compiler, FLAGS, cache_dir())

    def load(self, compiler: tuple[str, ...], flags: tuple[str, ...], folder: Path) -> ctypes.CDLL:
        """Load the compiled functions from a folder, and compile them first if they are missing.

        If `folder` is not writable, or if other users can write to it, a private temporary folder is used and removed.

        Raises:
            CannotBuildError: The compiler fails.
        """
        file_name = f"{self.fingerprint(compiler, flags)}.so"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _require_private(folder)
            path = folder / file_name
            if path.exists() and _is_private(path):
                with suppress(OSError):  # A damaged library is built again.
                    return self._open(path)
            self._build(compiler, flags, path)
            return self._open(path)
        except OSError:
            # The folder is not writable or not private, or libraries cannot be loaded from it.
            with tempfile.TemporaryDirectory() as private_folder:
                path = Path(private_folder, file_name)
                self._build(compiler, flags, path)
                return self._open(path)

    def fingerprint(self, compiler: tuple[str, ...], flags: tuple[str, ...]) -> str:
        """Return a hash of the source files, compiler command, compiler version and processor."""
        # The processor is included, because `-march=native` code may crash on another machine that shares the home
        # folder.
        inputs = [file.read_text() for file in self.files]
        inputs += compiler
        inputs += flags
        inputs.append(_run([*compiler, "--version"]))
        inputs.append(platform.machine())
        inputs.append(_processor())
        return hashlib.sha256("\0".join(inputs).encode()).hexdigest()[:16]

    def _build(self, compiler: tuple[str, ...], flags: tuple[str, ...], path: Path) -> None:
        # The processes of a node may build at the same time. With an atomic file each one loads a complete library.
        with atomic_path(path, has_rivals=True) as temporary_path:
            _run([*compiler, *flags, "-o", str(temporary_path), str(self.files[0])])
            temporary_path.chmod(0o700)

    def _open(self, path: Path) -> ctypes.CDLL:
        library = ctypes.CDLL(str(path))
        for name, argument_types in self.functions.items():
            function = getattr(library, name)
            function.restype = None
            function.argtypes = argument_types
        return library


def find_compiler() -> tuple[str, ...]:
    """Return the C++ compiler command from `$CXX`, or the first of c++, g++ and clang++ that is installed.

    Raises:
        CannotBuildError: No C++ compiler was found.
    """
    command = shlex.split(os.environ.get("CXX", ""))
    if command:
        if shutil.which(command[0]):
            return tuple(command)
        raise CannotBuildError(f"the compiler {command[0]}, set by $CXX, was not found")

    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return (name,)
    raise CannotBuildError("none of c++, g++ and clang++ was found")


def cache_dir() -> Path:
    """Return the folder in which compiled libraries are cached for the current user.

    It is in `$XDG_CACHE_HOME`, `~/.cache`, or on macOS in `~/Library/Caches`.
    """
    user_cache = os.environ.get("XDG_CACHE_HOME")
    if not user_cache and sys.platform == "darwin":
        user_cache = "~/Library/Caches"
    elif not user_cache:
        user_cache = "~/.cache"
    return Path(user_cache).expanduser() / "lightning_hybrid" / "cpp"


def _require_private(folder: Path) -> None:
    """Warn and raise `PermissionError` if other users own a folder or can write to it.

    Other users could otherwise replace the code that is loaded from the folder.
    """
    if _is_private(folder):
        return
    warnings.warn(
        f"`{folder}` must belong to you and must not be writable by other users, because compiled code is loaded from "
        f"it. The library is therefore built for this process only, which takes seconds. Run `chmod go-w {folder}`, "
        "or remove the folder if it is not yours.",
        stacklevel=3,
    )
    raise PermissionError(folder)


def _is_private(path: Path) -> bool:
    """Return whether a path belongs to the current user and is not writable by other users."""
    status = path.stat()
    if not hasattr(os, "getuid"):
        # Windows has neither owners nor modes, and a folder in the user's profile belongs to the user.
        return True
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


def _run(command: list[str]) -> str:
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuildError(f"{command[0]} could not be run: {error}") from error
    if process.returncode != 0:
        raise CannotBuildError(f"{command[0]} failed: {process.stderr.strip()[-300:]}")
    return process.stdout


def _processor() -> str:
    """Return the processor properties on which `-march=native` depends, if the system provides them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    keys = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part")
    distinct_lines = {line for line in lines if line.split(":")[0].strip() in keys}
    return "\n".join(sorted(distinct_lines))
