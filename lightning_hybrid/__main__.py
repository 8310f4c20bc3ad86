"""Console command `lightning-hybrid`, whose subcommands run the recipe programs.

    lightning-hybrid train trainer.devices=4
    torchrun --nproc-per-node=4 -m lightning_hybrid train

A wheel contains `recipes` and `conf` in a folder of this package. This module does not import torch, which would take
seconds, so that help texts and errors about misspelled commands appear at once.
"""

from __future__ import annotations

import ast
import difflib
import re
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

COMPLETION = """_lightning_hybrid() {
  local word="${COMP_LINE:0:COMP_POINT}" program="${COMP_WORDS[0]}" choices
  local words=($word)
  [[ "$word" == *" " ]] && words+=("")
  word="${words[-1]}"
  if [ "${#words[@]}" -eq 2 ]; then
    COMPREPLY=($(compgen -W "%s --help --version --shell-completion" -- "$word"))
    [ "${#COMPREPLY[@]}" -eq 1 ] && COMPREPLY[0]+=" "
  else
    choices=$(COMP_LINE="${words[*]:1}" "$program" "${words[1]}" --shell-completion query=bash 2> /dev/null)
    COMPREPLY=($(compgen -W "$choices" -- "$word"))
  fi
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=}
complete -o nospace -o default -F _lightning_hybrid lightning-hybrid"""
"""Bash completion script that completes subcommands, and asks Hydra to complete the keys of a subcommand."""

PACKAGE = Path(__file__).resolve().parent

QUICKSTART_PACKAGES = ("sklearn", "matplotlib")
"""Optional packages that `quickstart` imports. They are checked here, because the program is written like user code."""


def programs() -> dict[str, Path]:
    """Return a dictionary that maps each subcommand to the path of its program.

    The programs are in the wheel or in the source checkout.
    """
    recipes = PACKAGE / "_app" / "recipes"  # in a wheel
    if not recipes.is_dir():
        recipes = PACKAGE.parent / "recipes"
    return {path.stem.replace("_", "-"): path for path in sorted(recipes.glob("[!_]*.py"))}


def docstring_of(path: Path) -> str:
    """Return the module docstring of a program file without importing it."""
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def usage() -> str:
    """Return the help text of the console command, with a one-line summary of each subcommand.

    The summary is the beginning of the docstring of the subcommand's program.
    """
    lines = [
        "Train large batches with PyTorch Lightning.",
        "",
        "  lightning-hybrid COMMAND [key=value ...]",
        "",
    ]
    for name, path in programs().items():
        summary = re.split(r": |[.]", docstring_of(path))[0]
        lines.append(f"  {name:<12}{summary}")
    lines += [
        "",
        "Run lightning-hybrid COMMAND --help for the options of a command.",
        "To complete commands and keys in bash, run:",
        '  eval "$(lightning-hybrid --shell-completion bash)"',
    ]
    return "\n".join(lines)


def version() -> str:
    """Return the version of `lightning_hybrid` without importing it."""
    match = re.search(r'__version__ = "(.+)"', (PACKAGE / "__init__.py").read_text())
    if match is None:
        return "unknown"
    return match[1]


def answer(words: list[str], names: list[str]) -> str | None:
    """Return the text to print for an option such as `--help`, or None for any other arguments.

    >>> answer(["--shell-completion", "fish"], []) is None
    True
    """
    if words in ([], ["-h"], ["--help"], ["help"]):
        return usage()
    if words in (["-V"], ["--version"]):
        return f"lightning-hybrid {version()}"
    if words == ["--shell-completion", "bash"]:
        return COMPLETION % " ".join(names)
    return None


def main() -> None:
    """Run the recipe program named by the first command-line argument.

    This has the same effect as `python recipes/<name>.py`.
    """
    words = sys.argv[1:]
    files = programs()
    text = answer(words, list(files))
    if text is not None:
        print(text)
        return

    path = files.get(words[0].replace("_", "-"))
    if path is None:
        _exit_with_error(_unknown_command(words[0], list(files)))
    missing = [name for name in QUICKSTART_PACKAGES if find_spec(name) is None]
    if path.stem == "quickstart" and missing:
        _exit_with_error(
            f"`lightning-hybrid quickstart` needs packages that are not installed ({', '.join(missing)}). "
            "Install them with: pip install 'lightning-hybrid[recipes,report]'"
        )

    started_as = "lightning-hybrid"
    is_module = sys.modules["__main__"].__spec__ is not None
    if is_module:
        started_as = "python -m lightning_hybrid"
    has_configuration = (path.parents[1] / "conf" / f"{path.stem}.yaml").exists()
    wants_help = "-h" in words or "--help" in words
    if wants_help and not has_configuration:  # Otherwise Hydra prints the help.
        command = rf"python (recipes/)?{path.name}"
        print(re.sub(command, f"{started_as} {words[0]}", docstring_of(path)))
        return

    sys.argv = [str(path), *words[1:]]
    sys.path.insert(0, str(path.parent))  # as Python does for a script
    runpy.run_path(str(path), {"STARTED_AS": started_as}, run_name="__main__")


def _unknown_command(word: str, names: list[str]) -> str:
    hint = ""
    similar = difflib.get_close_matches(word, names, n=1)
    if similar:
        hint = f"Did you mean {similar[0]}? "
    return (
        f"`COMMAND` (={word}) must be one of {', '.join(names)}. {hint}Run `lightning-hybrid --help` for a "
        "description of each command."
    )


def _exit_with_error(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
