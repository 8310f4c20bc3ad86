"""The first second of a command: choices, values that cannot be, packages that are missing; no folder stays."""

import os
import subprocess
import sys

import pytest

from recipes.cli import usage
from tests.checkout import ROOT
from tests.programs import run_program

SAY = "import atexit, runpy, sys; atexit.register(lambda: print('torch' in sys.modules)); sys.argv = sys.argv[1:]"
RUN = "sys.path.insert(0, sys.argv[0].rpartition('/')[0]); runpy.run_path(sys.argv[0], run_name='__main__')"


@pytest.mark.parametrize(
    ("words", "code", "first"),
    [
        ("strategy/between_nodes=?", 0, "strategy/between_nodes=\n  adasum                  Of the nodes"),
        ("precision=fp16", 2, "error: `precision` (='fp16') must be"),
    ],
)
def test_a_question_or_a_wrong_value_is_answered_before_torch_is_imported(words, code, first, tmp_path):
    program = [sys.executable, "-c", f"{SAY}; {RUN}", str(ROOT / "recipes" / "train.py"), words]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == code
    assert (done.stderr if code else done.stdout).startswith(first)
    assert done.stdout.splitlines()[-1] == "False"
    assert not os.listdir(tmp_path)


def test_a_command_whose_packages_are_missing_says_the_line_that_installs_them(monkeypatch, capsys):
    monkeypatch.setattr(usage, "find_spec", lambda name: None if name == "matplotlib" else name)
    usage.refuse_missing_extras("train")
    with pytest.raises(usage.UsageError):
        usage.refuse_missing_extras("simulate")
    assert capsys.readouterr().err == (
        "error: `simulate` needs matplotlib, which is not installed: pip install 'lightning-hybrid[recipes,report]'\n"
    )


def test_a_refused_start_leaves_no_folder(tmp_path):
    done = run_program(str(ROOT / "recipes" / "train.py"), "optim.momentum=2", cwd=tmp_path)
    assert done.returncode == 2
    assert "`momentum` (=2" in done.stderr
    assert not list((tmp_path / "outputs").iterdir())


@pytest.mark.long
def test_a_simulation_imports_nothing_that_takes_seconds_but_torch(tmp_path):
    """Mutations: the shape of a convolution is left to torch; pictures are drawn unasked."""
    slow = "{'lightning', 'torch._dynamo', 'sympy', 'matplotlib'} & {*sys.modules}"
    say = SAY.replace("'torch' in sys.modules", slow)
    words = [str(ROOT / "recipes" / "simulate.py"), "num_nodes=2", "search=null", "hydra.run.dir=run"]
    done = subprocess.run([sys.executable, "-c", f"{say}; {RUN}", *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "set()"
