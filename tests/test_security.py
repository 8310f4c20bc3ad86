"""Security of the source and of loaded and written files: code injection, and leaks of the tracker's key.

`strategy/test_rendezvous.py` tests listening sockets. `recipes/cli/test_hydra_callbacks.py` tests a key in the
configuration.
"""

import ast
import ctypes
import os
import re
import stat
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from lightning_hybrid.cpp import library as cpp_library
from tests.checkout import tracked_files

SOURCES = [*tracked_files("lightning_hybrid/*.py"), *tracked_files("recipes/*.py")]


def test_no_file_that_is_loaded_can_bring_code():
    """Loading a file never runs code. Ruff forbids pickle, eval, shells and unsafe clocks (see pyproject.toml)."""
    # The state of an elastic run comes from another host and not from a file. Hosts trust each other.
    trusting = {path for path in SOURCES if path.match("lightning_hybrid/elastic/host_changes.py")}
    assert len(trusting) == 1
    for path in SOURCES:
        text = path.read_text()
        assert not re.search(r"weights_only: [^=]*= False|allow_pickle=True", text), path
        assert text.count("np.load(") == text.count("allow_pickle=False"), path
        if "torch.load(" not in text or path in trusting:
            continue
        for call in ast.walk(ast.parse(text)):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "torch.load":
                arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
                # The caller decides, with a default that is checked above.
                assert arguments["weights_only"] in ("True", "weights_only"), path


@pytest.fixture
def answers(tmp_path):
    """Return the path of a planted library that writes 2, and a function that loads a library that writes 1."""
    compiler = cpp_library.find_compiler()
    flags = ("-shared", "-fPIC")
    folder = tmp_path / "cache"
    sources = [tmp_path / "one.cpp", tmp_path / "two.cpp"]
    folder.mkdir(mode=0o700)
    for value, file in enumerate(sources, start=1):
        file.write_text(f'extern "C" void answer(double* place) {{ *place = {value}; }}')
    source = cpp_library.CppSource(
        files=(sources[0],), functions={"answer": (cpp_library.ADDRESS,)}
    )
    planted = folder / f"{source.fingerprint(compiler, flags)}.so"
    subprocess.run([*compiler, *flags, "-o", planted, sources[1]], check=True)
    planted.chmod(0o700)

    def answer():
        result = ctypes.c_double()
        source.load(compiler, flags, folder).answer(ctypes.byref(result))
        return result.value

    return planted, answer


def test_a_library_in_the_users_own_cache_is_loaded(answers):
    """The planted library is loaded if its folder is safe, which the following tests rely on."""
    assert answers[1]() == 2


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_library_in_a_folder_that_others_may_write_is_not_loaded(answers, mode):
    planted, answer = answers
    planted.parent.chmod(mode)
    before = planted.read_bytes()
    with pytest.warns(
        UserWarning, match=r"must belong to you and must not be writable.*`chmod go-w"
    ):
        assert answer() == 1
    assert [*planted.parent.iterdir()] == [planted], "nothing is put there either"
    assert planted.read_bytes() == before


def test_a_library_that_others_may_write_is_built_again(answers):
    planted, answer = answers
    planted.chmod(0o777)
    assert answer() == 1
    assert stat.S_IMODE(planted.stat().st_mode) == 0o700, (
        "with an open umask it would be built at each start"
    )


@pytest.mark.parametrize("whose", ["folder", "file"])
def test_a_folder_or_file_of_another_user_is_not_loaded(answers, monkeypatch, whose):
    planted, answer = answers
    if whose == "folder":
        theirs = planted.parent
        warning = pytest.warns(UserWarning, match="must belong to you")
    else:
        theirs = planted
        warning = nullcontext()
    original = Path.stat

    def stat_(path, **kwargs):
        result = original(path, **kwargs)
        return os.stat_result([*result[:4], result.st_uid + (path == theirs), *result[5:10]])

    monkeypatch.setattr(Path, "stat", stat_)
    with warning:
        assert answer() == 1


KEY = "feedc0ffee" * 5


def tracked_in_sight(run_dir, *overrides):
    """Run offline with checkpoints, a report and a key in the environment. Write the output to `output.txt`."""
    from tests.recipes.training.test_tracking import tracked

    kept = {number: os.dup(number) for number in (1, 2)}
    with open(f"{run_dir}/output.txt", "w") as output:
        for number in kept:
            os.dup2(output.fileno(), number)
        try:
            tracked(run_dir, *overrides, WANDB_API_KEY=KEY, WANDB_MODE="offline")
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, copy in kept.items():
                os.dup2(copy, number)
                os.close(copy)


@pytest.mark.long
def test_the_trackers_key_is_in_nothing_that_a_run_writes_or_says(one_rank, tmp_path):
    one_rank.run(tracked_in_sight, str(tmp_path), "trainer.max_epochs=1")
    files = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()]
    names = {path.name for path in files}
    assert {"last.ckpt", "summary.json", "run.html", "output.txt"} <= names
    assert any(name.endswith(".wandb") for name in names)
    assert not {path.name for path in files if KEY.encode() in path.read_bytes()}
