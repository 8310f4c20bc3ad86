"""Documentation pages: links, anchors and files exist, Python blocks compile, and examples train unchanged.

Web addresses are not opened. `tests/recipes/test_readme_commands.py` checks the options of the commands on the pages.
"""

import contextlib
import importlib.util
import re
import textwrap
import warnings
from functools import cache
from pathlib import Path
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from tests import toy
from tests.checkout import ROOT, tracked_files

PAGES = tracked_files("*.md")
SOURCES = [path.as_posix() for path in tracked_files("*.py")]
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)


def prose(text: str) -> str:
    """Return the text without code blocks and inline code."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


@cache
def anchors(page: Path) -> set[str]:
    """Return GitHub's anchors of a page's headings: lower case, hyphens for spaces, `-1` for the second of a name."""
    names = []
    for heading in re.findall(r"^#+ +(.+?) *#*$", FENCE.sub("", page.read_text()), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        names.append(re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-"))
    return {
        f"{name}-{names[:i].count(name)}" if name in names[:i] else name
        for i, name in enumerate(names)
    }


def relative_links(page: Path) -> list[str]:
    links = LINK.findall(prose(page.read_text()))
    targets = [inline or reference for inline, reference in links]
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def is_broken(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    if path:
        target = (page.parent / path).resolve()
    else:
        target = page
    if not target.exists():
        return True
    if target.is_dir():
        page_of_folder = target / "README.md"
    else:
        page_of_folder = target
    return bool(anchor) and (not page_of_folder.is_file() or anchor not in anchors(page_of_folder))


def absent_sources(page: Path) -> list[str]:
    """Return missing files (`folder/name.py`) that a page names. Dated records may name files that were removed."""
    if re.match(r"\d{4}-", page.parent.name) or page.name == "CHANGELOG.md":
        return []
    named = re.findall(r"`(\w+/[\w/]+\.py)`", FENCE.sub("", page.read_text()))
    return [name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in SOURCES)]


def python_blocks(page: Path) -> list[str]:
    return [
        textwrap.dedent(body)
        for _, language, body in FENCE.findall(page.read_text())
        if language == "python"
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_sources_of_a_page_are_there_and_its_python_compiles(page):
    assert [link for link in relative_links(page) if is_broken(page, link)] == []
    assert absent_sources(page) == []
    for block in python_blocks(page):
        compile(block, str(page), "exec")


def test_first_page_is_short_and_shows_an_example_before_the_picture():
    text = (ROOT / "README.md").read_text()
    lines = text.splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    shown = [re.sub(r"\]\([^)]*\)", "]", cell).strip() for row in rows for cell in row]
    assert len(lines) <= 110
    assert len(re.findall(r"\w[\w'-]*", prose(re.sub(r"\]\([^)]*\)|<[^>]*>", "]", text)))) <= 900
    assert len(rows) - 2 <= 8
    assert max(map(len, shown)) <= 90
    assert text.index("```python") < text.index("<img")


def test_the_menu_is_short_and_leads_to_pages_that_are_there():
    spec = importlib.util.spec_from_file_location("pages", ROOT / "docs" / "pages.py")
    builder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(builder)
    pages = {builder.place_of(page.relative_to(ROOT)) for page in PAGES}
    menu = builder.menu()
    assert menu <= pages
    assert 30 <= len(menu) <= 40
    assert [page for page in menu if "records" in page.parts] == [Path("recipes/records/index.md")]


def train_one_step(source):
    seen = []

    class OneStep(pl.Trainer):
        def __init__(self, **settings):
            quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
            super().__init__(**settings | quiet, enable_model_summary=False, max_steps=1)

        def fit(self, module, loader):
            before = toy.weights(module)
            super().fit(module, loader)
            after = {name: parameter.detach() for name, parameter in module.named_parameters()}
            moved = [name for name, value in after.items() if not torch.equal(value, before[name])]
            seen.append((after, moved, self.global_step, self.world_size))

    with mock.patch.object(pl, "Trainer", OneStep):
        exec(compile(source, "README.md", "exec"), {"__name__": "__main__"})
    return seen[0]


@pytest.mark.parametrize(
    "strategy",
    [
        '"hybrid_allreduce"',
        "lightning_hybrid.HybridPipelineStrategy(num_stages=2, num_microbatches=2)",
    ],
    ids=["as it stands", "in two stages of a pipeline"],
)
def test_user_code_of_the_first_page_trains_on_two_ranks(strategy, two_ranks):
    source = python_blocks(ROOT / "README.md")[0].replace('"hybrid_allreduce"', strategy)
    rank_0, rank_1 = two_ranks.run(train_one_step, source)
    after, moved, num_steps, num_ranks = rank_0
    assert (num_steps, num_ranks) == (1, 2)
    assert set(moved) == set(after)
    assert toy.same_bits(after, rank_1[0])


def train_two_steps(source, folder):
    """Train two steps of a page's code with `Classifier` and `loader` of the first page, on two CPU ranks."""
    seen = []

    class TwoSteps(pl.Trainer):
        def __init__(self, **settings):
            quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
            super().__init__(
                **settings | quiet | {"accelerator": "cpu", "devices": 2, "num_nodes": 1},
                max_steps=2,
            )

        def fit(self, module, *data, **options):
            super().fit(module, *data, **options)
            seen.append((toy.weights(module), self.global_step))

    names = {"__name__": "page"}
    exec(compile(python_blocks(ROOT / "README.md")[0], "README.md", "exec"), names)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))
    names["loader"] = DataLoader(data, batch_size=64)
    with (
        mock.patch.object(pl, "Trainer", TwoSteps),
        contextlib.chdir(folder),
        warnings.catch_warnings(),
    ):
        # The page mentions this warning.
        warnings.filterwarnings("ignore", message="Found . module.s. in eval mode")
        exec(compile(source, "page", "exec"), names)
    return seen


PAGES_WITH_CODE = [page for page in tracked_files("docs/*.md") if python_blocks(page)]


@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs_on_two_ranks_as_it_stands(page, two_ranks, tmp_path):
    source = "\n".join(python_blocks(page))
    rank_0, rank_1 = two_ranks.run(train_two_steps, source, str(tmp_path))
    for (weights_0, _), (weights_1, _) in zip(rank_0, rank_1, strict=True):
        assert toy.same_bits(weights_0, weights_1)
    # Only the tutorials call `fit`.
    assert [num_steps for _, num_steps in rank_0] == [2] * ("tutorials" in str(page))
