"""Console command: `lightning-hybrid train ...` runs the program that is `recipes/train.py` in a checkout.

    lightning-hybrid train trainer.devices=4
    torchrun --nproc-per-node=4 -m lightning_hybrid train

A wheel holds `recipes` and `conf` in a folder of this package. Nothing here imports torch: that takes seconds, and a
help or the answer to a misspelt word should not.
"""

from __future__ import annotations

import ast
import difflib
import re
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

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
"""Bash's: the name of a command, then what Hydra answers for its keys."""

PACKAGE = Path(__file__).resolve().parent

QUICKSTART_PACKAGES = ("sklearn", "matplotlib")
"""Imports of `quickstart` that are extras. It is a script as a user writes one, and checks nothing itself."""


def programs() -> dict[str, Path]:
    """Return the file of each command, by name: of the wheel, or of the checkout around the package."""
    of_wheel = PACKAGE / "_app" / "recipes"
    recipes = of_wheel if of_wheel.is_dir() else PACKAGE.parent / "recipes"
    return {path.stem.replace("_", "-"): path for path in sorted(recipes.glob("[!_]*.py"))}


def docstring_of(path: Path) -> str:
    """Return the docstring of a program, which is not imported."""
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def usage() -> str:
    """Format the commands, a line each: the start of the docstring of each program."""
    lines = [
        "Train large batches with PyTorch Lightning.",
        "",
        "  lightning-hybrid COMMAND [key=value ...]",
        "",
    ]
    for name, path in programs().items():
        lines.append(f"  {name:<12}{re.split(r': |[.]', docstring_of(path))[0]}")
    lines += [
        "",
        "lightning-hybrid COMMAND --help shows what to set. Completion of commands and keys in bash:",
    ]
    return "\n".join([*lines, '  eval "$(lightning-hybrid --shell-completion bash)"'])


def version() -> str:
    """Return the version, read and not imported."""
    found = re.search(r'__version__ = "(.+)"', (PACKAGE / "__init__.py").read_text())
    return found[1] if found else "unknown"


def answer(words: list[str], names: list[str]) -> str | None:
    """Return what a command line without a command asks for; None where it makes no sense.

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
    """Run the command that the first argument names, as `python recipes/<name>.py` would."""
    words, found = sys.argv[1:], programs()
    if (text := answer(words, list(found))) is not None:
        print(text)
        return
    path = found.get(words[0].replace("_", "-"))
    if path is None:
        near = difflib.get_close_matches(words[0], found, n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        print(
            f"error: `COMMAND` (={words[0]}) must be one of {', '.join(found)}. {hint}`lightning-hybrid --help` says "
            "what each does.",
            file=sys.stderr,
        )
        raise SystemExit(2)
    missing = [name for name in QUICKSTART_PACKAGES if find_spec(name) is None]
    if path.stem == "quickstart" and missing:
        print(
            f"error: `lightning-hybrid quickstart` needs packages that are not installed ({', '.join(missing)}). "
            "Install them with: pip install 'lightning-hybrid[recipes,report]'",
            file=sys.stderr,
        )
        raise SystemExit(2)
    is_module = sys.modules["__main__"].__spec__ is not None
    started_as = "python -m lightning_hybrid" if is_module else "lightning-hybrid"
    has_configuration = (path.parents[1] / "conf" / f"{path.stem}.yaml").exists()
    if not has_configuration and {"-h", "--help"} & set(words):  # else Hydra answers
        print(
            re.sub(
                rf"python (recipes/)?{path.name}", f"{started_as} {words[0]}", docstring_of(path)
            )
        )
        return
    sys.argv = [str(path), *words[1:]]
    sys.path.insert(0, str(path.parent))  # as Python does for a script
    runpy.run_path(str(path), {"STARTED_AS": started_as}, run_name="__main__")


if __name__ == "__main__":
    main()
