"""Extensions of a fit: code of the documentation page, errors in each hook, order at the end, and imports."""

import ast
import re
import sys
import warnings
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

from lightning_hybrid import (
    FitExtension,
    HybridAllReduceStrategy,
    HybridPipelineStrategy,
    LocalSteps,
)
from lightning_hybrid.comm import CommEngine
from lightning_hybrid.precision.half_window import HalfPrecisionWindow
from tests import toy
from tests.checkout import ROOT, tracked_in
from tests.test_readme import python_blocks

PAGE = ROOT / "lightning_hybrid" / "strategy" / "extensions.md"
LIMIT_S = 120


def fit_of_the_page(source):
    names = {}
    exec(compile(source, "extensions.md", "exec"), names)
    module = toy.Toy()
    trainer = toy.trainer(strategy=names["strategy"], max_epochs=1)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    trainer.fit(module, toy.loader(num_samples=16))  # one step
    moved = [
        (parameter.detach() - old).norm()
        for parameter, old in zip(module.parameters(), before, strict=True)
    ]
    return float(trainer.callback_metrics["optim/update_norm"]), float(torch.stack(moved).norm())


def test_the_extension_of_the_page_logs_the_norm_of_an_update(two_ranks):
    (source,) = python_blocks(PAGE)
    results = two_ranks.run(fit_of_the_page, source)
    for rank, (logged, expected) in enumerate(results):
        assert logged == pytest.approx(expected, rel=1e-6), f"rank {rank}"
        assert logged > 0, f"rank {rank}"


class RecordsCalls(FitExtension):
    """Extension that records the calls of its hooks and fails in some of them."""

    def __init__(self, fit, name, calls, fails=()):
        self.name = name
        self.calls = calls
        self.fails = fails
        self.note("constructor", is_recorded=False)

    def note(self, hook, is_recorded=True):
        if is_recorded:
            self.calls.append(f"{self.name}.{hook}")
        if hook in self.fails:
            raise ValueError(f"{self.name}.{hook}")

    def before_optimizers(self, fit):
        assert not fit.trainer.optimizers

    def before_batch(self, fit, batch_idx):
        if batch_idx == 0:
            self.note("before_batch")

    def step(self, fit, optimizer, run):
        self.note("step", is_recorded=False)
        return run()

    def _noted(hook):
        return lambda self, fit, *error: self.note(hook)

    after_setup = _noted("after_setup")
    before_validation = _noted("before_validation")
    in_validation = _noted("in_validation")
    after_validation = _noted("after_validation")
    before_train_end = _noted("before_train_end")
    failed = _noted("failed")

    def save(self, fit, checkpoint):
        checkpoint[self.name] = 1
        self.note("save")

    def load(self, fit, checkpoint):
        self.note(f"load {checkpoint[self.name]}")

    def end(self, fit, error):
        assert not fit.engine._is_closed
        kind = "" if error is None else type(error).__name__
        self.calls.append(f"{self.name}.end({kind})")
        self.note("end", is_recorded=False)

    def put_back(self, fit, error):
        assert not hasattr(fit, "engine")
        self.note("put_back")


@dataclass
class Fitted:
    """Record of a fit on one rank: calls of the extensions a, b and c, error, and warnings at the end."""

    rank: int
    calls: list[str]
    error: str
    notes: list[str]
    warnings: list[str]

    def calls_of(self, *hooks):
        return [call for call in self.calls if re.split(r"[( ]", hook_of(call))[0] in hooks]


def hook_of(call):
    return call.partition(".")[2]


def fit(fails, batch_error_on=(), path=None, ckpt_path=None):
    calls = []
    module = toy.Toy()
    error = ""
    notes = []
    factories = [
        partial(RecordsCalls, name=name, calls=calls, fails=fails.get(name, ())) for name in "abc"
    ]
    if dist.get_rank() in batch_error_on:
        module.training_step = lambda batch, batch_idx: {}["label"]
    strategy = HybridAllReduceStrategy(extensions=factories, ranks_per_node=1, timeout=30)
    trainer = toy.trainer(strategy=strategy, max_epochs=1, num_sanity_val_steps=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, toy.loader(16), toy.loader(16), ckpt_path=ckpt_path)
            if path is not None:
                trainer.save_checkpoint(path)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
            notes = getattr(raised, "__notes__", [])
    messages = [str(warning.message) for warning in caught]
    assert "ExtensionHooks" not in {type(callback).__name__ for callback in trainer.callbacks}
    assert strategy._comm.engine is None
    return Fitted(
        rank=dist.get_rank(),
        calls=calls,
        error=error,
        notes=notes,
        warnings=[message for message in messages if "the cleanup failed with" in message],
    )


HOOKS_OF_A_GOOD_FIT = [
    "after_setup",
    "before_batch",
    "before_validation",
    "in_validation",
    "in_validation",
    "after_validation",
    "before_train_end",
    "end()",
    "put_back",
    "save",
]


def test_a_good_fit_calls_hooks_in_order_and_ends_in_reverse(two_ranks, tmp_path):
    path = tmp_path / "last.ckpt"
    ended = ["c.end()", "b.end()", "a.end()"]
    put_back = ["c.put_back", "b.put_back", "a.put_back"]
    for fitted in two_ranks.run(fit, {}, (), path, timeout_s=LIMIT_S):
        assert fitted.error == ""
        of_a = [hook_of(call) for call in fitted.calls if call.startswith("a.")]
        assert of_a == HOOKS_OF_A_GOOD_FIT, f"rank {fitted.rank}"
        assert fitted.calls_of("end", "put_back") == [*ended, *put_back], f"rank {fitted.rank}"
        assert fitted.calls_of("save") == ["a.save", "b.save", "c.save"]
    for fitted in two_ranks.run(fit, {}, (), None, path, timeout_s=LIMIT_S):
        assert fitted.error == ""
        assert fitted.calls_of("load") == ["a.load 1", "b.load 1", "c.load 1"]


@pytest.mark.parametrize(
    ("fails", "begun"),
    [
        ({"b": ("constructor",)}, ""),
        ({"b": ("after_setup",)}, "ab"),
        ({"a": ("before_batch",)}, "abc"),
        ({"c": ("step",)}, "abc"),
    ],
)
def test_an_error_of_an_extension_is_the_fits_and_ends_what_has_begun(two_ranks, fails, begun):
    ((name, (hook,)),) = fails.items()
    if begun:
        changed = "abc"
    else:
        changed = ""
    expected = [f"{extension}.failed" for extension in begun]
    expected += [f"{extension}.end(ValueError)" for extension in reversed(begun)]
    expected += [f"{extension}.put_back" for extension in reversed(changed)]
    for fitted in two_ranks.run(fit, fails, timeout_s=LIMIT_S):
        assert fitted.error.startswith(f"ValueError: {name}.{hook}"), f"rank {fitted.rank}"
        assert fitted.calls_of("failed", "end", "put_back") == expected, f"rank {fitted.rank}"
        assert not fitted.warnings


def test_the_error_of_a_fit_is_raised_although_extensions_fail_after_it(two_ranks):
    fails = {"a": ("failed", "put_back"), "b": ("end",)}
    expected = [f"{extension}.failed" for extension in "abc"]
    expected += [f"{extension}.end(KeyError)" for extension in "cba"]
    expected += [f"{extension}.put_back" for extension in "cba"]
    for fitted in two_ranks.run(fit, fails, (0, 1), timeout_s=LIMIT_S):
        assert fitted.error.startswith("KeyError"), f"rank {fitted.rank}"
        assert fitted.calls_of("failed", "end", "put_back") == expected, f"rank {fitted.rank}"
        assert any("RecordsCalls.failed: ValueError: a.failed" in note for note in fitted.notes)
        failed = [text.rpartition(" ")[2] for text in fitted.warnings]
        assert failed == ["b.end", "a.put_back"]


def test_a_rank_that_fails_alone_ends_the_extensions_of_all(two_ranks):
    for fitted in two_ranks.run(fit, {}, (1,), timeout_s=LIMIT_S):
        assert "KeyError" in fitted.error, f"rank {fitted.rank}"
        assert len(fitted.calls_of("failed")) == 3, f"rank {fitted.rank}"
        ends = fitted.calls_of("end")
        assert len(ends) == 3, f"rank {fitted.rank}"
        without_error = [call for call in ends if call.endswith(".end()")]
        assert without_error == []


def test_errors_at_the_end_of_a_good_fit_are_raised_once_all_have_ended(two_ranks):
    """Lightning then reports the error and tears down again, but nothing is ended twice or calls another collective."""
    fails = {"a": ("end",), "c": ("end",)}
    for fitted in two_ranks.run(fit, fails, timeout_s=LIMIT_S):
        assert fitted.error.startswith("ValueError: c.end"), f"rank {fitted.rank}"
        assert any("And then ValueError: a.end" in note for note in fitted.notes)
        assert fitted.calls_of("end") == ["c.end()", "b.end()", "a.end()"]
        assert fitted.calls_of("put_back") == ["c.put_back", "b.put_back", "a.put_back"]
        assert len(fitted.calls_of("failed")) == 3
        assert not fitted.warnings


def order_of_the_end(options, precision):
    ended = []
    with pytest.MonkeyPatch.context() as patch:
        for kind, name, label in (
            (FitExtension, "end", lambda extension: "end"),
            (CommEngine, "close", lambda engine: f"engine of {engine.topology.world_size}"),
            (HalfPrecisionWindow, "end", lambda window: "window"),
            (FitExtension, "put_back", lambda extension: "put back"),
            (DDPStrategy, "teardown", lambda strategy: "DDP"),
        ):
            original = getattr(kind, name)

            def call(self, *args, original=original, label=label):
                ended.append(label(self))
                return original(self, *args)

            patch.setattr(kind, name, call)
        strategy = HybridAllReduceStrategy(extensions=[lambda fit: FitExtension()], **options)
        toy.trainer(strategy=strategy, precision=precision, max_epochs=1).fit(
            toy.Toy(), toy.loader(16)
        )
    return ended


def test_a_fit_ends_extensions_then_the_engine_then_the_window_then_the_module(two_ranks):
    """The node's engine of local steps closes before the engine of all ranks."""
    options = {"between_nodes": LocalSteps(every=2), "ranks_per_node": 1}
    order = ["end", "engine of 1", "engine of 2", "window", "put back", "put back", "DDP"]
    assert two_ranks.run(order_of_the_end, options, "16-true") == [order] * 2


def test_extensions_that_are_no_list_of_factories_are_refused():
    for wrong in ([FitExtension()], [partial, "name"], FitExtension(), FitExtension, 3, "name"):
        with pytest.raises(
            ValueError, match=r"^`extensions` .* must be a list of extension factories"
        ):
            HybridAllReduceStrategy(extensions=wrong)
    with pytest.raises(
        ValueError, match=r"^`extensions` .* and a pipeline cannot be combined: .* Leave `ext"
    ):
        HybridPipelineStrategy(extensions=[FitExtension])
    strategy = HybridAllReduceStrategy(extensions=[lambda fit: None])
    with pytest.raises(ValueError, match=r"must return a `FitExtension` .* returned NoneType"):
        toy.trainer(strategy=strategy).fit(toy.Toy(), toy.loader())


FEATURES = ("feedback_state", "local_steps", "shard_update", "node_slices")


def modules_after(options):
    # Later tests must find the modules that they imported.
    with pytest.MonkeyPatch.context() as patch:
        modules = {feature: f"lightning_hybrid.strategy.{feature}" for feature in FEATURES}
        imported = [name for name in sys.modules if name.startswith(tuple(modules.values()))]
        for name in imported:
            patch.setattr(name, sys.modules[name])
        for name in imported:
            patch.delitem(sys.modules, name)
        strategy = HybridAllReduceStrategy(**options)
        toy.trainer(strategy=strategy, precision="16-true", max_epochs=1).fit(
            toy.Toy(), toy.loader()
        )
        used = [feature for feature, name in modules.items() if name in sys.modules]
        return strategy._extensions.members == (), used


def test_a_fit_without_an_option_imports_none_of_its_modules(two_ranks):
    assert two_ranks.run(modules_after, {}) == [(True, [])] * 2
    options = {"between_nodes": LocalSteps(every=2), "ranks_per_node": 1}
    assert two_ranks.run(modules_after, options) == [(False, ["local_steps"])] * 2


def test_extensions_know_neither_the_strategy_nor_each_other():
    folders = ("local_steps", "shard_update", "node_slices")
    modules = [("feedback_state", ROOT / "lightning_hybrid/strategy/feedback_state.py")]
    modules += [
        (folder, path)
        for folder in folders
        for path in tracked_in(ROOT / "lightning_hybrid/strategy" / folder, "*.py")
    ]
    shared = {"extension", "node_groups", "user_code_checks", "option_classes", "compatibility"}
    for feature, path in modules:
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "module", None) or ""
            if name.startswith("lightning_hybrid.strategy."):
                assert name.split(".")[2] in {feature, *shared}, f"{path} imports {name}"
            assert not (isinstance(node, ast.Attribute) and node.attr == "strategy"), (
                f"{path}:{node.lineno}"
            )
