"""Check of code density and docstrings that `.ci/quick` runs."""

import importlib.util
import sys
from types import ModuleType

import pytest

from tests.checkout import ROOT

PACKED = "a, b = min(x, y), max(x, y); c = [f(i, j) for i in a for j in b if i < j]\n"
PLAIN = "total = total + 1\n"


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "readability_check", ROOT / ".ci" / "readability.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_a_packed_file_fails_and_a_plain_one_passes(check, tmp_path):
    packed = tmp_path / "packed.py"
    packed.write_text(PACKED * 30)
    plain = tmp_path / "plain.py"
    plain.write_text(PLAIN * 30)

    figures = {"packed.py": check.measure(packed), "plain.py": check.measure(plain)}
    (complaint,) = check.problems(figures, exceptions={})

    assert figures["plain.py"].tokens_per_line == 5.0
    assert complaint.startswith("packed.py: 40.0 tokens per line of code, at most 9.0")


@pytest.mark.parametrize(
    "first_line", ["What a rank sends.", "Whether it is over.", "Sums; and averages."]
)
def test_a_docstring_that_begins_as_a_riddle_fails(check, tmp_path, first_line):
    path = tmp_path / "riddle.py"
    path.write_text(f'def send():\n    """{first_line}\n\n    More."""\n')

    (complaint,) = check.problems({"riddle.py": check.measure(path)}, exceptions={})

    assert repr(first_line) in complaint


def test_an_exception_covers_its_figure_and_has_to_shrink_with_its_file(check, tmp_path):
    path = tmp_path / "packed.py"
    path.write_text(PACKED * 30)
    figures = {"packed.py": check.measure(path)}

    assert check.problems(figures, {"packed.py": {"tokens_per_line": 40.0}}) == []
    (worse,) = check.problems(figures, {"packed.py": {"tokens_per_line": 39.9}})
    (better,) = check.problems(figures, {"packed.py": {"tokens_per_line": 40.1}})

    assert "at most 39.9" in worse
    assert "can shrink" in better


def test_an_update_lowers_exceptions_and_adds_none(check, tmp_path):
    path = tmp_path / "packed.py"
    path.write_text(PACKED * 30)
    figures = {"packed.py": check.measure(path), "also_packed.py": check.measure(path)}
    too_high = {"packed.py": {"tokens_per_line": 50.0, "bad_first_lines": 2}, "gone.py": {}}

    assert check.lowered(figures, too_high) == {"packed.py": {"tokens_per_line": 40.0}}
