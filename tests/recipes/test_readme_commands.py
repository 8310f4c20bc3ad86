"""Commands on documentation pages: each names an existing program, and the configuration check accepts it."""

import inspect
import re
import shlex
from importlib import import_module
from importlib.util import find_spec

import pytest

from recipes.cli import config_check
from recipes.datasets.images import imagenet
from tests.checkout import ROOT, tracked_files, tracked_in
from tests.recipes.cli import fuzzed

PROGRAM = r"(?:python|torchrun|srun)\b[^`\n]*?(?:(recipes/[\w/]+)\.py|-m ((?:tests|recipes)[\w.]+))"
OF_PACKAGE = r"(?:lightning-hybrid|-m lightning_hybrid) ([a-z][a-z-]*)"
COMMAND = re.compile(
    rf"(?:{PROGRAM}|{OF_PACKAGE})(?![\w-])((?:\"[^\"\n]*\"|'[^'\n]*'|[^`\n|>&;])*)"
)
# A program that exists only in the history. A page that says so may contain its commands.
LEFT = re.compile(r"`git show \w{7,}:([\w/]+)")
# Text that the reader fills in.
PLACEHOLDERS = {
    r"<[^<>\n]*>": "x",
    "seed=N": "seed=0",
    "cluster=ours": "cluster=netlab",
}


def commands(text: str) -> list[tuple[str, str]]:
    r"""Return program and arguments of each command of a page, in a block or within a sentence.

    >>> commands("see `python recipes/a/b.py x=1`:\n    torchrun -n 2 \\\n recipes/c.py y=2 # why\n`python -m tests.d`")
    [('recipes.a.b', ' x=1'), ('recipes.c', ' y=2 # why'), ('tests.d', '')]
    >>> commands("`lightning-hybrid gpu-check --device cpu`\ntorchrun -m lightning_hybrid train z=3")
    [('recipes.gpu_check', ' --device cpu'), ('recipes.train', ' z=3')]
    """
    for placeholder, value in PLACEHOLDERS.items():
        text = re.sub(placeholder, value, text)
    programs_and_arguments = []
    for path, module, name, arguments in COMMAND.findall(text.replace("\\\n", " ")):
        of_package = f"recipes.{name.replace('-', '_')}"
        program = path.replace("/", ".") or module or of_package
        programs_and_arguments.append((program, arguments))
    return programs_and_arguments


def overrides_of(arguments: str) -> list[str]:
    """Return the overrides that Hydra composes, without options and `...`. Of a sweep, return the first job."""
    words = shlex.split(arguments, comments=True)
    overrides = [word for word in words if "=" in word and not word.startswith("--")]
    if "--multirun" in words:
        return [word if "[" in word else word.partition(",")[0] for word in overrides]
    return overrides


def cases() -> dict[tuple[str, str], str]:
    """Return the first page of each command."""
    page_of = dict[tuple[str, str], str]()
    for path in [ROOT / "README.md", *tracked_files("*/*.md")]:
        text = path.read_text()
        removed = tuple(folder.replace("/", ".") for folder in LEFT.findall(text))
        for program, arguments in commands(text):
            if not program.startswith(removed):
                page_of.setdefault((program, arguments), str(path.relative_to(ROOT)))
    return page_of


CASES = [pytest.param(command, id=f"{page}: {command[0]}") for command, page in cases().items()]


@pytest.mark.sampled(16)
@pytest.mark.parametrize("command", CASES)
def test_the_check_accepts_every_command(command, monkeypatch, tmp_path):
    program, arguments = command
    assert find_spec(program) is not None, f"there is no {program}"
    if find_spec(program).submodule_search_locations:
        program += ".__main__"
    if "hydra.main" not in inspect.getsource(import_module(program)):
        return  # it has its own options
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr(imagenet, "count_classes", lambda root: 2)  # the reader's own folder
    check = config_check.check
    accepted = []

    def check_and_stop(*args):
        accepted.append(check(*args))
        raise fuzzed.WorkStartsError

    monkeypatch.setattr(config_check, "check", check_and_stop)
    overrides = overrides_of(arguments)
    config = fuzzed.composed(program, *overrides, folder=str(tmp_path))
    kind, text = fuzzed.outcome_of(program, config)
    # A sentence that names the program.
    is_mention = not overrides and "(=???) is required" in text
    assert is_mention or (kind, text, len(accepted)) == ("built", "", 1)


def test_there_are_commands_of_every_program():
    programs = {program for program, _ in cases()}
    assert {f"recipes.{path.stem}" for path in tracked_in(ROOT / "recipes", "[!_]*.py")} <= programs
