"""Console command: quick answers, the command that a word selects, and completion in bash."""

import os
import shutil
import subprocess
import sys

import pytest

from lightning_hybrid import __main__ as console_command
from lightning_hybrid import __version__
from recipes.cli import usage
from tests.checkout import ROOT, tracked_in
from tests.programs import run_program
from tests.without import environment_without

COMMANDS = sorted(path.stem.replace("_", "-") for path in tracked_in(ROOT / "recipes", "[!_]*.py"))
SCRIPT = """
import sys
sys.modules["torch"] = None
from lightning_hybrid.__main__ import main
main()
"""


def console(*words):
    """Run `lightning-hybrid *words` in an environment where torch cannot be imported."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HYDRA_FULL_ERROR": "0"}
    command = [sys.executable, "-c", SCRIPT, *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_help_names_every_command_in_a_line_each():
    done = console()
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    named = [
        line.split(maxsplit=1)
        for line in lines
        if line.startswith("  ") and line.split()[0] in COMMANDS
    ]
    assert {"train", "gpu-check"} < {name for name, _ in named} == set(COMMANDS)
    assert all(len(about) > 10 for _, about in named)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100


def test_the_version_is_the_packages_and_an_unknown_command_is_one_message_and_exit_code_2():
    assert console("--version").stdout == f"lightning-hybrid {__version__}\n"
    done = console("trian")
    assert (done.returncode, done.stdout) == (2, "")
    rule = f"error: `COMMAND` (=trian) must be one of {', '.join(COMMANDS)}. Did you mean train? "
    assert (
        done.stderr == f"{rule}Run `lightning-hybrid --help` for a description of each command.\n"
    )


COMPLETED = {
    "lightning-hybrid t": "train tune",
    "lightning-hybrid si": "simulate ",
    "lightning-hybrid train optim.l": "optim.lr=",
    "lightning-hybrid train logger=csv optim=l": "optim=lamb optim=lars",
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_and_then_keys_and_choices():
    """The test calls the function as bash does when the user presses Tab."""
    lines = [
        f'lightning-hybrid() {{ "{sys.executable}" "{ROOT}/lightning_hybrid/__main__.py" "$@"; }}'
    ]
    lines.append('eval "$(lightning-hybrid --shell-completion bash)"')
    for line in COMPLETED:
        words = " ".join(f"'{word}'" for word in line.split(" "))
        lines.append(f"COMP_LINE='{line}' COMP_POINT={len(line)} COMP_WORDS=({words})")
        lines.append('_lightning_hybrid; IFS=" "; echo "${COMPREPLY[*]}"; unset IFS')
    lines.append("complete -p lightning-hybrid | grep -o 'F .*'")
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines() == [
        *COMPLETED.values(),
        "F _lightning_hybrid lightning-hybrid",
    ], done.stderr


SAY = "import atexit, runpy, sys; atexit.register(lambda: print('torch' in sys.modules)); sys.argv = sys.argv[1:]"
RUN = "sys.path.insert(0, sys.argv[0].rpartition('/')[0]); runpy.run_path(sys.argv[0], run_name='__main__')"


@pytest.mark.parametrize(
    ("words", "code", "first"),
    [
        (
            "strategy/between_nodes=?",
            0,
            "strategy/between_nodes=\n  adasum                  Adasum: the mean of the nodes",
        ),
        ("precision=fp16", 2, "error: `precision` (='fp16') must be"),
        (
            "optim.lr=abc",
            2,
            "error: `optim.lr` (='abc') must be a number. Set optim.lr=10.0, for example.",
        ),
        ("global_batch_size=0", 2, "error: `global_batch_size` (=0) must be above 0"),
        (
            "trainer.devices=3",
            2,
            "error: `global_batch_size` (=128) must be a multiple of the number of ranks (=3)",
        ),
        (
            "global_batch_size=127",
            2,
            "error: `global_batch_size` (=127) must be a multiple of the number of ranks (=2)",
        ),
        (
            "resume=no.ckpt",
            2,
            "error: `resume` (=no.ckpt) is not an existing file. The current directory is",
        ),
        ("optim.rl=3", 2, "error: unknown key `optim.rl` (=3). Did you mean optim.lr=3? Run "),
        (
            "data=images",
            2,
            "error: `data.root` (=???) is required, but has no value. Missing keys: data.root.",
        ),
    ],
)
def test_a_question_or_a_wrong_value_is_answered_before_torch_is_imported(
    words, code, first, tmp_path
):
    program = [sys.executable, "-c", f"{SAY}; {RUN}", str(ROOT / "recipes" / "train.py"), words]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == code
    assert (done.stderr if code else done.stdout).startswith(first)
    assert done.stdout.splitlines()[-1] == "False"
    assert not os.listdir(tmp_path)


def test_a_command_whose_packages_are_missing_says_the_line_that_installs_them(monkeypatch, capsys):
    monkeypatch.setattr(usage, "find_spec", lambda name: None if name == "matplotlib" else name)
    usage.refuse_missing_extras("train")
    usage.refuse_missing_extras("simulate")
    with pytest.raises(usage.UsageError):
        usage.refuse_missing_extras("tune")
    assert capsys.readouterr().err == (
        f"error: `{usage.command('tune')}` needs packages that are not installed (matplotlib). Install them with: "
        "pip install 'lightning-hybrid[recipes,report]'\n"
    )
    monkeypatch.setattr(usage, "find_spec", lambda name: None)
    assert "(hydra-core, omegaconf, pydantic, scikit-learn, Pillow)" in usage.missing_extras(
        "train"
    )


@pytest.mark.parametrize(
    "words", [("train",), ("train", "--help"), ("simulate", "num_nodes=2")], ids=" ".join
)
def test_a_core_install_says_which_extras_a_command_lacks(words, tmp_path):
    """Without Hydra, neither the command line nor the help can be processed."""
    there = environment_without(tmp_path, ("hydra", "omegaconf"))
    command = [sys.executable, "-m", "lightning_hybrid", *words]
    done = subprocess.run(
        command, env=there, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: `python -m lightning_hybrid {words[0]}` needs packages")
    assert done.stderr.endswith(
        "(hydra-core, omegaconf). Install them with: pip install 'lightning-hybrid[recipes]'\n"
    )


@pytest.mark.parametrize("name", ["sklearn", "matplotlib"])
def test_quickstart_says_which_extra_it_lacks(name, monkeypatch, capsys):
    monkeypatch.setattr(
        console_command, "find_spec", lambda package: None if package == name else package
    )
    monkeypatch.setattr(sys, "argv", ["lightning-hybrid", "quickstart"])
    with pytest.raises(SystemExit) as end:
        console_command.main()
    assert end.value.code == 2
    assert (
        f"({name}). Install them with: pip install 'lightning-hybrid[recipes,report]'"
        in capsys.readouterr().err
    )


def test_a_refused_start_leaves_no_folder(tmp_path):
    done = run_program(str(ROOT / "recipes" / "train.py"), "optim.momentum=2", cwd=tmp_path)
    assert done.returncode == 2
    assert "`momentum` (=2" in done.stderr
    assert not list((tmp_path / "outputs").iterdir())


def test_a_run_from_scratch_does_not_overwrite_the_checkpoints_of_another(tmp_path):
    """The same command is run again in the same directory."""
    (tmp_path / "run1" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run1" / "checkpoints" / "last.ckpt").write_bytes(b"weights")
    done = run_program(str(ROOT / "recipes" / "train.py"), "hydra.run.dir=run1", cwd=tmp_path)
    assert done.returncode == 2
    assert (
        "`hydra.run.dir` (=run1) already contains a run with checkpoints/last.ckpt" in done.stderr
    )
    assert "Add resume=auto to continue it or overwrite=true to start again" in done.stderr
    assert [path.name for path in (tmp_path / "run1").iterdir()] == ["checkpoints"]
