"""Fuzzed configurations: any value of any recipe key is accepted, or rejected with the key's name and a remedy."""

import json
import re

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from PIL import Image

from tests.recipes.cli import fuzzed

# Cases per recipe in every run and in a long run. `--fuzz-cases 1000` makes more.
NUM_CASES = [5, pytest.param(30, marks=pytest.mark.long)]

# Words of which each message needs at least one: a rule, or what to do.
CURES = re.compile(
    r"\b(must|Set|Give|Leave|Remove|Check|Correct|correct|Use|Run|Choose|Did you mean|Options)\b"
)

# End of every message about an error that torch or Lightning raised.
ENDING = "Set HYDRA_FULL_ERROR=1 to see the traceback."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Create a folder with an image set and a run."""
    folder = tmp_path_factory.mktemp("fuzz")
    for class_name in ("train/a", "train/b", "val/a", "val/b"):
        class_folder = folder / "images" / class_name
        class_folder.mkdir(parents=True)
        for name in "xy":
            Image.new("RGB", (8, 8)).save(class_folder / f"{name}.jpg")
    (folder / "run").mkdir()
    content = {
        "metrics": {},
        "best": {},
        "config": {},
        "num_steps": 1,
        "images_per_s": None,
        "environment": {},
    }
    (folder / "run" / "summary.json").write_text(json.dumps(content))
    (folder / "run" / "curves.json").write_text(json.dumps({"train/loss": [[1, 0.5]]}))
    return folder


@pytest.mark.sampled(4)
@pytest.mark.parametrize("num_cases", NUM_CASES)
@pytest.mark.parametrize("recipe", fuzzed.BASES, ids=lambda recipe: recipe.replace(" ", "+"))
def test_every_value_is_built_or_refused_by_name(
    recipe, num_cases, folder, monkeypatch, tmp_path, pytestconfig
):
    monkeypatch.chdir(tmp_path)  # some values are paths
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    fuzzed.stop_where_work_starts(monkeypatch)
    program = recipe.strip()
    overrides = [word.replace("TMP", str(folder)) for word in fuzzed.BASES[recipe]]
    base = fuzzed.composed(program, *overrides, folder=str(folder))
    assert fuzzed.outcome_of(program, base) == ("built", "")
    keys = fuzzed.keys_of(base)
    cases = settings(
        max_examples=pytestconfig.getoption("--fuzz-cases") or num_cases,
        derandomize=True,
        phases=[Phase.generate],  # cases are small, so they need no shrinking
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )

    @cases
    @given(key=st.sampled_from(keys), action=fuzzed.ACTIONS, value=fuzzed.VALUES)
    def is_built_or_refused(key, action, value):
        kind, text = fuzzed.outcome_of(program, fuzzed.changed(base, key, action, value))
        note(f"{recipe} {action} {key}={value!r}: {kind} {text}")
        if kind == "error":
            name = key.rpartition(".")[2]
            if action == "misspell":
                name += "_"
            assert text.startswith("error: ")
            assert re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text), f"{key} is not named"
            assert CURES.search(text.removesuffix(ENDING)), "no cure"

    is_built_or_refused()
