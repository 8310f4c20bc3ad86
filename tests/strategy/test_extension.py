"""Extensions: the page's code, what an error in each hook does, the order of the end, and what is not imported."""

import ast
import sys
import warnings
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
from lightning_hybrid.precision.window import HalfPrecisionWindow
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
    for logged, expected in two_ranks.run(fit_of_the_page, source):
        assert logged == pytest.approx(expected, rel=1e-6)
        assert logged > 0


class Says(FitExtension):
    def __init__(self, fit, name, said, fails=()):
        self.name = name
        self.said = said
        self.fails = fails
        self.note("made", kept=False)

    def note(self, hook, kept=True):
        if kept:
            self.said.append(f"{self.name}.{hook}")
        if hook in self.fails:
            raise ValueError(f"{self.name}.{hook}")

    def before_optimizers(self, fit):
        assert not fit.trainer.optimizers

    def before_batch(self, fit, batch_idx):
        if batch_idx == 0:
            self.note("before_batch")

    def step(self, fit, optimizer, run):
        self.note("step", kept=False)
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
        self.said.append(f"{self.name}.end({'' if error is None else type(error).__name__})")
        self.note("end", kept=False)

    def put_back(self, fit, error):
        assert not hasattr(fit, "engine")
        self.note("put_back")


def fit(fails, batch_error_on=(), path=None, ckpt_path=None):
    said = []
    module = toy.Toy()
    error = ""
    notes = []
    if isinstance(fails, list):
        fails = fails[dist.get_rank()]
    else:
        fails = fails
    factories = [partial(Says, name=name, said=said, fails=fails.get(name, ())) for name in "abc"]
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
    texts = [str(one.message) for one in caught if "could not be ended" in str(one.message)]
    assert not [one for one in trainer.callbacks if type(one).__name__ == "ExtensionHooks"]
    assert strategy._comm.engine is None
    return said, error, texts, notes


def hooks(said, *names):
    return [one for one in said if one.split(".")[1].split("(")[0].split(" ")[0] in names]


def test_a_good_fit_calls_hooks_in_order_and_ends_in_reverse(two_ranks, tmp_path):
    for said, error, _, _ in two_ranks.run(fit, {}, (), tmp_path / "one.ckpt", timeout_s=LIMIT_S):
        assert error == ""
        each = [one.split(".")[1] for one in said if one.startswith("a.")]
        steps = [
            "after_setup",
            "before_batch",
            "before_validation",
            "in_validation",
            "in_validation",
        ]
        assert each == [*steps, "after_validation", "before_train_end", "end()", "put_back", "save"]
        ended = [f"{one}.end()" for one in "cba"]
        put_back = [f"{one}.put_back" for one in "cba"]
        assert hooks(said, "end", "put_back") == [*ended, *put_back]
        assert hooks(said, "save") == ["a.save", "b.save", "c.save"]
    for said, error, _, _ in two_ranks.run(
        fit, {}, (), None, tmp_path / "one.ckpt", timeout_s=LIMIT_S
    ):
        assert error == ""
        assert hooks(said, "load") == ["a.load 1", "b.load 1", "c.load 1"]


@pytest.mark.parametrize(
    ("fails", "begun"),
    [
        ({"b": ("made",)}, ""),
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
    for said, error, texts, _ in two_ranks.run(fit, fails, timeout_s=LIMIT_S):
        assert error.startswith(f"ValueError: {name}.{hook}")
        expected = [f"{one}.failed" for one in begun] + [
            f"{one}.end(ValueError)" for one in reversed(begun)
        ]
        assert hooks(said, "failed", "end", "put_back") == expected + [
            f"{one}.put_back" for one in reversed(changed)
        ]
        assert not texts


def test_an_error_of_the_fit_stays_the_one_that_is_seen(two_ranks):
    fails = {"a": ("failed", "put_back"), "b": ("end",)}
    for said, error, texts, notes in two_ranks.run(fit, fails, (0, 1), timeout_s=LIMIT_S):
        assert error.startswith("KeyError")
        failed = [f"{one}.failed" for one in "abc"]
        ended = [f"{one}.end(KeyError)" for one in "cba"]
        put_back = [f"{one}.put_back" for one in "cba"]
        assert hooks(said, "failed", "end", "put_back") == [*failed, *ended, *put_back]
        assert any("Says.failed: ValueError: a.failed" in note for note in notes)
        assert [text.rpartition(" ")[2] for text in texts] == ["b.end", "a.put_back"]


def test_a_rank_that_fails_alone_ends_the_extensions_of_all(two_ranks):
    both = two_ranks.run(fit, {}, (1,), timeout_s=LIMIT_S)
    for said, error, _, _ in both:
        assert "KeyError" in error
        assert [hook for hook in hooks(said, "end") if hook.endswith(".end()")] == []
        assert len(hooks(said, "failed")) == len(hooks(said, "end")) == 3


def test_errors_at_the_end_of_a_good_fit_are_raised_once_all_have_ended(two_ranks):
    """Lightning then reports and tears down again: nothing is ended twice, and nothing collective follows."""
    fails = {"a": ("end",), "c": ("end",)}
    for said, error, texts, notes in two_ranks.run(fit, fails, timeout_s=LIMIT_S):
        assert error.startswith("ValueError: c.end")
        assert any("And then ValueError: a.end" in note for note in notes)
        assert hooks(said, "end") == ["c.end()", "b.end()", "a.end()"]
        assert hooks(said, "put_back") == ["c.put_back", "b.put_back", "a.put_back"]
        assert len(hooks(said, "failed")) == 3
        assert not texts


def ends(options, precision):
    said = []
    with pytest.MonkeyPatch.context() as patch:
        for kind, name, label in (
            (FitExtension, "end", lambda one: "end"),
            (CommEngine, "close", lambda engine: f"engine of {engine.topology.world_size}"),
            (HalfPrecisionWindow, "end", lambda window: "window"),
            (FitExtension, "put_back", lambda one: "put back"),
            (DDPStrategy, "teardown", lambda strategy: "DDP"),
        ):
            before = getattr(kind, name)

            def call(self, *args, before=before, label=label):
                said.append(label(self))
                return before(self, *args)

            patch.setattr(kind, name, call)
        strategy = HybridAllReduceStrategy(extensions=[lambda fit: FitExtension()], **options)
        toy.trainer(strategy=strategy, precision=precision, max_epochs=1).fit(
            toy.Toy(), toy.loader(16)
        )
    return said


def test_a_fit_ends_extensions_then_the_engine_then_the_window_then_the_module(two_ranks):
    """The nodes' engine of local steps closes before that of all ranks."""
    options = {"between_nodes": LocalSteps(every=2), "ranks_per_node": 1}
    order = ["end", "engine of 1", "engine of 2", "window", "put back", "put back", "DDP"]
    assert two_ranks.run(ends, options, "16-true") == [order] * 2


def test_an_extension_that_is_no_factory_is_refused():
    for wrong in ([FitExtension()], [partial, "name"], FitExtension(), FitExtension, 3, "name"):
        with pytest.raises(
            ValueError, match=r"^`extensions` .* must be a list of factories of extensions"
        ):
            HybridAllReduceStrategy(extensions=wrong)
    with pytest.raises(
        ValueError, match=r"^`extensions` .* and a pipeline cannot be combined: .* Leave `ext"
    ):
        HybridPipelineStrategy(extensions=[FitExtension])
    strategy = HybridAllReduceStrategy(extensions=[lambda fit: None])
    with pytest.raises(ValueError, match=r"must be factories .* returned NoneType"):
        toy.trainer(strategy=strategy).fit(toy.Toy(), toy.loader())


FEATURES = ("feedback_state", "local_steps", "shard_update", "node_slices")


def modules_after(options):
    # tests that come after find the modules that they know
    with pytest.MonkeyPatch.context() as patch:
        names = [f"lightning_hybrid.strategy.{one}" for one in FEATURES]
        known = [name for name in sys.modules if name.startswith(tuple(names))]
        for name in known:
            patch.setattr(name, sys.modules[name])
        for name in known:
            patch.delitem(sys.modules, name)
        strategy = HybridAllReduceStrategy(**options)
        toy.trainer(strategy=strategy, precision="16-true", max_epochs=1).fit(
            toy.Toy(), toy.loader()
        )
        results = [one for one, name in zip(FEATURES, names, strict=True) if name in sys.modules]
        return strategy._extensions.members == (), results


def test_a_fit_without_an_option_imports_none_of_its_modules(two_ranks):
    assert two_ranks.run(modules_after, {}) == [(True, [])] * 2
    one_of = {"between_nodes": LocalSteps(every=2), "ranks_per_node": 1}
    assert two_ranks.run(modules_after, one_of) == [(False, ["local_steps"])] * 2


def test_extensions_know_neither_the_strategy_nor_each_other():
    folders = ("local_steps", "shard_update", "node_slices")
    modules = [("feedback_state", ROOT / "lightning_hybrid/strategy/feedback_state.py")]
    modules += [
        (folder, path)
        for folder in folders
        for path in tracked_in(ROOT / "lightning_hybrid/strategy" / folder, "*.py")
    ]
    known = {"extension", "node_groups", "arguments", "options", "compatibility"}
    for own, path in modules:
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "module", None) or ""
            if name.startswith("lightning_hybrid.strategy."):
                assert name.split(".")[2] in {own, *known}, f"{path} imports {name}"
            assert not (isinstance(node, ast.Attribute) and node.attr == "strategy"), (
                f"{path}:{node.lineno}"
            )
