"""Configurations of every recipe with one error, and the point that the recipe reaches with them."""

import copy
import importlib
import inspect
import logging
import os
import re
import warnings
from contextlib import contextmanager, redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hypothesis import reject
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import GrammarParseError

CONF = Path(__file__).resolve().parents[3] / "conf"

# Overrides with which each program is composed. `TMP` stands for a folder with an image set and a run.
BASES: dict[str, list[str]] = {
    "recipes.train": [
        "callbacks=[default,ema,time_to_accuracy]",
        "callbacks.time_to_accuracy.target=0.9",
    ],
    "recipes.train ": "data=images data.root=TMP/images model=resnet50 model.depth=18 "
    "model.width=0.0625 global_batch_size=2 data.image_size=32 optim=lamb logger=csv".split(),
    "recipes.train  ": "data=synthetic data.image_size=16 model.in_channels=3 model.num_classes=1000 optim=sgd "
    "strategy=ddp precision=32-true logger=none".split(),
    "recipes.simulate": [
        "num_steps=2",
        "scaling_ranks=[1]",
        "search.algorithms=[flat]",
        "search.bucket_bytes=[4194304]",
    ],
    "recipes.search": [],
    "recipes.study": [],
    "recipes.pack": ["root=TMP/images", "out=TMP/out/shards"],
    "recipes.bench": [],
    "recipes.report": ["runs=[TMP/run]"],
    "recipes.tune": [],
}

# Functions with which work starts: (module, class or None, name). Nothing after them runs.
WORK = [
    ("lightning.pytorch", "Trainer", "fit"),
    ("lightning.fabric", "Fabric", "launch"),
    ("recipes.hyperparams.runner", "TrialRunner", "run"),
    ("recipes.comparison.fits", "FitPool", "__enter__"),
    ("recipes.datasets.packing", "Packing", "run"),
]


class WorkStartsError(BaseException):
    """Signal that everything is built and work would start."""


def stop_where_work_starts(monkeypatch) -> None:
    def stop(*_, **__):
        raise WorkStartsError

    for module, kind, name in WORK:
        owner = importlib.import_module(module)
        monkeypatch.setattr(owner if kind is None else getattr(owner, kind), name, stop)


@cache
def composed(program: str, *overrides: str, folder: str) -> DictConfig:
    """Compose the configuration of a program as its `hydra.main` does, with Hydra's own part."""
    name = re.findall(r'config_name="(.*)"', inspect.getsource(importlib.import_module(program)))[0]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose(name, overrides=list(overrides), return_hydra_config=True)
    OmegaConf.set_readonly(cfg.hydra, False)
    with open_dict(cfg):
        cfg.hydra.runtime.output_dir = f"{folder}/out"
        cfg.hydra.job.num = 0
        cfg.hydra.job.id = "0"
    return cfg


def keys_of(cfg: DictConfig) -> list[str]:
    """Return the keys of all groups and values, except those that only name output locations."""

    def walk(value, key):
        if isinstance(value, dict):
            for name, child in value.items():
                yield from walk(child, f"{key}.{name}" if key else str(name))
        if key:
            yield key

    plain = OmegaConf.to_container(cfg, resolve=False)
    del plain["hydra"]
    output_keys = ("run_dir", "out", "packing.out")
    keys = []
    for key in walk(plain, ""):
        is_plain = not any(mark in key for mark in ",[ ")
        if is_plain and key not in output_keys:
            keys.append(key)
    return keys


NUMBERS = [-1, 0, 2, 2**31, 10**30, -0.5, 1.5, float("nan"), float("inf"), -float("inf")]
WORDS = [
    "",
    "zzz",
    "???",
    "ä ☃",
    "/dev/null/no",
    "${nope.nope}",
    "${",
    "null",
    "1e3",
    "os.system",
    "torch.nn.ReLU",
]
VALUES = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(WORDS),
    st.sampled_from(
        [
            None,
            True,
            False,
            [],
            [1],
            ["zzz"],
            {},
            {"a": 1},
            [[]],
            {"_target_": "os.system", "command": ":"},
        ]
    ),
    st.text(max_size=12),
)
ACTIONS = st.sampled_from(["set"] * 8 + ["misspell", "remove", "loop"])


def changed(cfg: DictConfig, key: str, action: str, value) -> DictConfig:
    """Return a copy of the configuration with one error."""
    cfg = copy.deepcopy(cfg)
    OmegaConf.set_readonly(cfg.hydra, False)
    if action == "remove":
        parent, _, name = key.rpartition(".")
        with open_dict(cfg):
            group = OmegaConf.select(cfg, parent) if parent else cfg
            del group[name]
        cfg.hydra.overrides.task = [f"~{key}"]
        return cfg
    if action == "loop":
        value = f"${{{key}}}"
    if action == "misspell":
        key = f"{key}_"
    try:
        OmegaConf.update(cfg, key, value, merge=False, force_add=True)
    except GrammarParseError:  # Hydra itself rejects it
        reject()
    cfg.hydra.overrides.task = [f"{key}=..."]
    return cfg


def outcome_of(program: str, cfg: DictConfig) -> tuple[str, str]:
    """Return `("built", "")` or `("error", message)`. Raise any other exception."""
    main = importlib.import_module(program).main.__wrapped__
    HydraConfig.instance().set_config(cfg)
    cfg_of_main = copy.deepcopy(cfg)
    OmegaConf.set_struct(cfg_of_main, False)
    del cfg_of_main["hydra"]
    OmegaConf.set_struct(cfg_of_main, True)
    with _process_as_it_was(), warnings.catch_warnings(), redirect_stdout(StringIO()):
        warnings.simplefilter("ignore")
        try:
            main(cfg_of_main)
        except WorkStartsError:
            pass
        except SystemExit as end:
            return "error", str(end)
    return "built", ""


@contextmanager
def _process_as_it_was():
    before = dict(os.environ)
    logging.disable()
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        HydraConfig.instance().cfg = None
        for name in set(os.environ) - set(before):
            del os.environ[name]
