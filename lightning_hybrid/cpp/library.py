"""Build, cache and load C++ passes over memory, which run without Python's lock."""

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

# No -ffast-math: inf and nan must be seen. The last two only say that roots set no errno and comparisons do not trap.
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
FLOAT_BITS = Path(__file__).with_name("float_bits.h")  # that all sources include
ADDRESS, COUNT = ctypes.c_void_p, ctypes.c_int64  # of arguments


class CannotBuildError(RuntimeError):
    """A missing C++ compiler, or one that does not take the source; the message is for a warning."""


@dataclass(frozen=True, kw_only=True)
class CppSource:
    """C++ source: `files`, of which the first is compiled and the others are included, and its C `functions`.

    `functions`: the types of the arguments of each, by name; none returns anything.
    """

    files: tuple[Path, ...]
    functions: Mapping[str, tuple[type, ...]]

    def library(self) -> ctypes.CDLL:
        """Load the functions into this process: from the cache, or built now, which takes a few seconds.

        Raises:
            CannotBuildError: There is no compiler, or it fails.
        """
        compiler = find_compiler()
        errors = []
        for flags in ((*FLAGS, _NATIVE), FLAGS):  # not every compiler knows the processor by itself
            try:
                return self.load(compiler, flags, cache_dir())
            except CannotBuildError as error:
                errors.append(error)
        raise errors[-1]

    def load(self, compiler: tuple[str, ...], flags: tuple[str, ...], folder: Path) -> ctypes.CDLL:
        """Load the functions from `folder`; build them first if they are not there.

        Where `folder` cannot be written, or others could have, a private temporary folder is used and removed.

        Raises:
            CannotBuildError: The compiler fails.
        """
        name = f"{self.fingerprint(compiler, flags)}.so"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_users_own(folder):
                cure = f"`chmod go-w {folder}` lets it be used, or remove it where it is not yours"
                warnings.warn(
                    f"`{folder}` must be yours, and writable by no other: code is loaded from it. Its library "
                    f"is built for this process alone, in seconds; {cure}.",
                    stacklevel=2,
                )
                raise PermissionError(folder)
            place = folder / name
            if place.exists() and _is_users_own(place):
                with suppress(OSError):  # a damaged library: build it again
                    return self._open(place)
            self._build(compiler, flags, place)
            return self._open(place)
        except OSError:  # nothing can be written there, or nothing loaded from there
            with tempfile.TemporaryDirectory() as private:
                place = Path(private, name)
                self._build(compiler, flags, place)
                return self._open(place)

    def fingerprint(self, compiler: tuple[str, ...], flags: tuple[str, ...]) -> str:
        """Hash source, command, compiler and processor."""
        # `-march=native` code of one machine may crash another that shares the home folder.
        version = _run([*compiler, "--version"])
        parts = [
            *(file.read_text() for file in self.files),
            *compiler,
            *flags,
            version,
            platform.machine(),
        ]
        return hashlib.sha256("\0".join([*parts, _processor()]).encode()).hexdigest()[:16]

    def _build(self, compiler: tuple[str, ...], flags: tuple[str, ...], place: Path) -> None:
        # The processes of a node may build at once: each loads a whole file, its own or another's.
        with atomic_path(place, has_rivals=True) as part:
            _run([*compiler, *flags, "-o", str(part), str(self.files[0])])
            part.chmod(0o700)

    def _open(self, place: Path) -> ctypes.CDLL:
        opened = ctypes.CDLL(str(place))
        for name, arguments in self.functions.items():
            function = getattr(opened, name)
            function.restype, function.argtypes = None, arguments
        return opened


def find_compiler() -> tuple[str, ...]:
    """Return the command of the C++ compiler: `$CXX` if set, else the first of c++, g++ and clang++.

    Raises:
        CannotBuildError: There is none.
    """
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return tuple(command)
    raise CannotBuildError(
        f"there is no {named[0]}, which $CXX names" if named else "there is no c++, g++ or clang++"
    )


def cache_dir() -> Path:
    """Return our folder in the user's cache: of `$XDG_CACHE_HOME` or `~/.cache`; on macOS of `~/Library/Caches`."""
    default = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or default).expanduser() / "lightning_hybrid" / "cpp"
    )


def _is_users_own(place: Path) -> bool:
    found = place.stat()
    # Windows has neither owner nor mode, and a folder of the user's there is the user's.
    return not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not found.st_mode & 0o022)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuildError(f"{command[0]} did not run: {error}") from error
    if done.returncode != 0:
        raise CannotBuildError(f"{command[0]} said: {done.stderr.strip()[-300:]}")
    return done.stdout


def _processor() -> str:
    # As `-march=native` sees it, as far as the system says.
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    keys = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(sorted({line for line in lines if line.split(":")[0].strip() in keys}))
