"""Command lines before torch is imported: help that fits a screen, suggestions for misspelt keys, command names."""

import re
import runpy
import shlex
import sys

import pytest
from hydra.core.hydra_config import HydraConfig

from recipes.cli import command_line, preflight, usage
from tests.checkout import ROOT, tracked_files, tracked_in

HYDRA_PROGRAMS = sorted(
    path.stem
    for path in tracked_in(ROOT / "recipes", "[!_]*.py")
    if (ROOT / "conf" / f"{path.stem}.yaml").exists()
)


@pytest.fixture
def read(monkeypatch, capsys):
    """Return a function that reads a command line in this process and returns exit code, output and error.

    Hydra is reset afterwards.
    """
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    before = HydraConfig.instance().cfg

    def read_words(name, *words):
        monkeypatch.setattr(sys, "argv", [f"recipes/{name}.py", *words])
        code = 0
        try:
            command_line.read(name)
            code = None
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    yield read_words
    HydraConfig.instance().cfg = before


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", HYDRA_PROGRAMS)
def test_help_fits_a_screen_and_names_keys_that_are_there(name, read, monkeypatch):
    monkeypatch.chdir(ROOT)
    code, text, _ = read(name, "--help")
    lines = text.splitlines()
    assert code == 0
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    assert lines[0].endswith(".")
    examples = [shlex.split(line) for line in lines if re.match(r"  (python|torchrun)", line)]
    assert len(examples) >= 2
    assert f"python recipes/{name}.py --cfg job" in text
    for words in examples:
        overrides = [word for word in words if "=" in word and not word.startswith("--")]
        if "cluster=ours" in overrides:
            overrides.remove("cluster=ours")
        assert command_line.refusals(name, [], overrides, is_sweep="--multirun" in words) == []
    rows = [line[2:].partition("  ")[0] for line in lines[2:] if re.match(r"  [a-z_.]+=", line)]
    keys = {key for row in rows for key in re.findall(r"(?:^| )([a-z_.]+)=", row)}
    assert len(rows) >= 3
    choices = []
    if name == "train":
        choices = ["data=images"]
    config, *_ = command_line.composed(name, choices)
    assert keys <= {*command_line.keys_of(config), "hydra.run.dir", "recipe"}


MISSPELT = {
    "trainer.max_epochs=2 data.rot=/x optim=rprop": "must be one of adamw, lamb, lars, sgd",
    "optim.learning_rate=3": "Did you mean optim.lr=3?",
    "epochs=3": "Did you mean trainer.max_epochs=3?",
    "strategy.algorithm=flat": "Did you mean strategy.comm.algorithm=flat?",
    "strategy.between_nodes.every=8": "mean strategy/between_nodes=local_steps strategy.between_nodes.every=8?",
    "~optim.lrr": "Did you mean ~optim.lr?",
    "strategy=hybrid_alreduce": "must be one of ddp, elastic, fsdp2, hybrid, pipeline. Did you mean strategy=hybrid?",
    "cluster=netlab": "use a plus: +cluster=netlab.",
    "data.root=/a(b)/c": """Put quotes around values with special characters, as in 'data.root="/a(b)/c"'.""",
    "--multirun optim.learning_rate=1,2": "unknown key `optim.learning_rate` (=1,2). Did you mean",
    "--config-dir=/nowhere": "'/nowhere' not found",
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("words", MISSPELT)
def test_what_is_misspelt_is_refused_with_a_cure(words, read):
    code, out, err = read("train", *words.split())
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    num_wrong_words = 2 if "rprop" in words else 1
    assert err.count("error: ") == num_wrong_words, "a line for each wrong word"
    assert MISSPELT[words] in err


CHOICES = [path for path in tracked_files("conf/*.yaml") if path.parent != ROOT / "conf"]


@pytest.mark.parametrize("path", CHOICES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_description_of_a_choice_is_not_cut_within_a_sentence(path):
    """The description ends with the comment, or before a word with a capital letter."""
    comment = []
    for line in path.read_text().splitlines():
        if line.startswith("# @"):
            continue
        if not re.match(r"# \S", line):
            break
        comment.append(line.removeprefix("# "))
    text = " ".join(comment)
    description = command_line.description_of(path.read_text())
    assert text.startswith(description)
    rest_of_comment = text[len(description) :]
    assert re.fullmatch(r"|:| [A-Z].*", rest_of_comment), description
    assert len(description) < 170


def test_descriptions_of_choices_stand_in_one_column(read):
    _, out, _ = read("train", "recipe=?")
    rows = [line for line in out.splitlines() if line.startswith("  ")]
    columns = {re.match(r"  \S+ +", row).end() for row in rows}
    assert len(columns) == 1


@pytest.mark.parametrize("words", ["--help", "strategy=?", "--cfg job"])
def test_a_question_is_answered_without_the_extras_of_the_command(words, read, monkeypatch):
    monkeypatch.setattr(usage, "find_spec", lambda name: None)
    code, out, err = read("train", *words.split())
    assert (code, err) == (0, "")
    last = out.strip().splitlines()[-1]
    assert ("pip install 'lightning-hybrid[recipes]'" in last) == (words == "--help")
    code, out, err = read("train", "optim.lr=1")
    assert (code, out) == (2, "")
    packages = "hydra-core, omegaconf, pydantic, scikit-learn, Pillow"
    assert f"needs packages that are not installed ({packages})" in err


def test_packages_of_a_part_are_asked_for_before_torch_is_imported(read, monkeypatch):
    monkeypatch.setattr(usage, "find_spec", lambda name: None if name == "transformers" else name)
    code, out, err = read("train", "recipe=bert_tiny")
    assert (code, out) == (2, "")
    assert err == (
        "error: `recipes.networks.bert.Bert` needs packages that are not installed (transformers). Install them with: "
        "pip install 'lightning-hybrid[text]'\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "error: `root` (=???) is required, but has no value. Missing keys: root, out."),
        (
            "root=/nope out=x",
            "error: `root` (=/nope) does not exist. Set root to the folder to pack.",
        ),
        (
            "root=/ out=x packing.quality=high",
            "error: `packing.quality` (='high') must be a number.",
        ),
    ],
)
def test_what_pack_needs_is_asked_for_before_torch_is_imported(words, message, read):
    code, out, err = read("pack", *words.split())
    assert (code, out) == (2, "")
    assert err.startswith(message)


@pytest.mark.parametrize(("resume", "overwrite"), [("auto", False), (None, True)])
def test_a_directory_of_another_run_is_taken_to_continue_or_where_the_user_says_so(
    tmp_path, resume, overwrite
):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").write_bytes(b"weights")
    preflight.refuse_to_overwrite(tmp_path, resume=resume, overwrite=overwrite)
    preflight.refuse_to_overwrite(tmp_path / "new", resume=None, overwrite=False)
    with pytest.raises(ValueError, match=r"^`hydra.run.dir` .* already contains a run"):
        preflight.refuse_to_overwrite(tmp_path, resume=None, overwrite=False)


def test_what_hydra_composes_goes_on_and_of_several_ranks_the_first_speaks(read, monkeypatch):
    for words in (
        "",
        "--multirun optim.lr=5,10,20 seed=1,2",
        "+mine=0.5 optim.lr=${mine}",
        "logger=csv",
    ):
        assert read("train", *words.split()) == (None, "", "")
    waits = []
    monkeypatch.setattr("time.sleep", waits.append)
    monkeypatch.setenv("RANK", "1")
    assert read("train", "optm.lr=3") == (2, "", "")
    assert waits == [5]  # the launcher ends all ranks when one has ended
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # then Hydra reports the error
    assert read("train", "optm.lr=3") == (None, "", "")


def test_a_command_is_named_as_this_one_was_started(tmp_path, monkeypatch):
    program = tmp_path / "program.py"
    program.write_text("from recipes.cli.usage import command\nname = command('gpu_check')\n")
    started_as = {"STARTED_AS": "lightning-hybrid"}
    variables = runpy.run_path(str(program), started_as, run_name="__main__")
    assert variables["name"] == "lightning-hybrid gpu-check"
    monkeypatch.chdir(ROOT)
    assert usage.command("gpu_check") == "python recipes/gpu_check.py"
    monkeypatch.chdir(tmp_path)
    assert usage.command("gpu_check") == f"python {ROOT}/recipes/gpu_check.py"
