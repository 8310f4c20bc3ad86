"""Answers of the planner on memory and pipelines, for networks with numbers known by hand."""

import re
from dataclasses import replace
from functools import cache, partial
from operator import attrgetter

import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_iter

from lightning_hybrid.optim import LAMB
from lightning_hybrid.planning.estimates import activations
from lightning_hybrid.planning.estimates.activations import (
    LiveBytes,
    has_checkpointing,
    meta_step,
    step_bytes,
    with_checkpointing,
)
from lightning_hybrid.planning.estimates.blocks import traced_blocks
from lightning_hybrid.planning.estimates.layers import WithoutValues, layers_of
from lightning_hybrid.planning.estimates.memory import MemoryNeed, StateBytes
from lightning_hybrid.planning.estimates.parallelism import pipeline_choices
from lightning_hybrid.planning.estimates.scenario import Scenario
from lightning_hybrid.planning.model.cost import Link
from lightning_hybrid.planning.report.memory_report import MemoryReport
from lightning_hybrid.planning.report.pipeline_report import what_pays
from recipes.networks.bert import Bert
from recipes.networks.flops import forward_flops_per_image
from recipes.networks.resnet import ResNet

pytest.importorskip("hydra", reason="the clusters are described in conf/")

from tests.evidence.planner.known_clusters import cluster_of, vgg16
from tests.recipes.test_simulate import reported, scenario

nbytes = attrgetter("nbytes")
STATE = StateBytes.of(precision="16-true", optimizer="lars", copies_gradients=False)
IMAGE = (3, 224, 224)


def on_meta(make, **arguments):
    with torch.device("meta"):
        return make(**arguments)


NETWORKS = {"resnet50": partial(on_meta, ResNet), "vgg16": partial(on_meta, vgg16)}


@cache
def blocks_of_known(name):
    return tuple(traced_blocks(NETWORKS[name](), IMAGE))


def test_what_is_alive_on_the_meta_device_is_what_is_alive_on_the_cpu():
    """The peak bytes of forward and backward are equal for the same network on both devices."""
    small = {"depth": 18, "width": 0.125, "num_classes": 10}

    def peak(network, images):
        with LiveBytes([*network.parameters(), *network.buffers(), images]) as live:
            network(images).sum().backward()
        return live.peak

    shape = (2, 3, 32, 32)
    on_cpu = peak(ResNet(**small), torch.zeros(shape))
    assert on_cpu == peak(on_meta(ResNet, **small), torch.empty(shape, device="meta"))
    assert on_cpu > 2 * 3 * 32 * 32 * 4
    with LiveBytes() as live:
        tensor = torch.empty(100, device="meta")
        view = tensor[:50].view(5, 10)  # is not counted
        del tensor
        assert live.now == 400
        del view
        assert live.now == 0
        torch.empty(50, device="meta")
    assert live.peak == 400


@pytest.mark.parametrize("affine", [True, False])
def test_normalization_without_weights_is_counted(affine):
    with torch.device("meta"):
        network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, affine=affine))

    num_bytes = step_bytes(network, IMAGE, batch_size=2, precision="32-true")

    output_bytes = 2 * 8 * (IMAGE[-1] - 2) ** 2 * 4
    assert num_bytes >= 2 * output_bytes  # outputs of both layers


def test_activations_of_resnet_50_are_those_that_its_docstring_says():
    """ResNet-50 has 82 MiB per image in fp32, and 30 MiB with re-materialisation."""
    network = on_meta(ResNet)

    def mib_per_image(network):
        return step_bytes(network, IMAGE, batch_size=8, precision="32-true") / 8 / 2**20

    plain = mib_per_image(network)
    checkpointed = mib_per_image(with_checkpointing(network, is_on=True))
    assert 82 <= plain <= 1.06 * 82
    assert 30 <= checkpointed <= 1.25 * 30  # plus one block at a time, which is recomputed
    assert network.checkpoint_activations is False
    assert has_checkpointing(network)
    assert not has_checkpointing(nn.Linear(1, 1))


@pytest.mark.parametrize("name", ["resnet50", "vgg16"])
def test_blocks_have_all_parameters_all_flops_and_all_that_is_kept(name):
    network = NETWORKS[name]()
    blocks = blocks_of_known(name)
    numels = [parameter.numel() for parameter in network.parameters()]
    assert sorted(numel for block in blocks for numel in block.numels) == sorted(numels)
    assert sum(block.forward_flops for block in blocks) == forward_flops_per_image(network, IMAGE)
    # The peak of a step also contains the largest gradient of a parameter, before it is in its bucket.
    kept = 8 * sum(block.kept_bytes for block in blocks)
    peak = step_bytes(network, IMAGE, batch_size=8, precision="16-true")
    assert kept < peak < 1.05 * kept + 2 * max(numels)


class Shortcut(nn.Module):
    """Network with a shortcut around two of its layers."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        x = self.a(x)
        return self.d(self.c(self.b(x)) + x)


def test_no_cut_goes_through_a_shortcut():
    """Before c, both b's output and the shortcut would have to be sent. Before b and before d there is one tensor."""
    assert [block.name for block in traced_blocks(on_meta(Shortcut), (6,))] == ["a", "b", "d"]


def test_no_cut_separates_two_uses_of_a_parameter_which_is_counted_once():
    network = on_meta(
        lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.ReLU())
    )

    def numels_of_blocks():
        return [block.numels for block in traced_blocks(network, (4, 1, 1))]

    assert numels_of_blocks() == [(16, 4), (), (16, 4), ()]
    network[2].weight = network[0].weight
    assert numels_of_blocks() == [(16, 4, 4), ()]


def need_of(settings, state_bytes, activation_bytes, **fields):
    return MemoryNeed(
        settings=settings, state_bytes=state_bytes, activation_bytes=activation_bytes, **fields
    )


ASKED = need_of((), 60e9, 40e9, batch_size=10)
SHARED = need_of(("x=node",), 50e9, 40e9, batch_size=10, extra_s=0.1)
FEWER = need_of(("b=5",), 60e9, 20e9, batch_size=5)
AGAIN = need_of(("x=node", "y=true"), 50e9, 10e9, batch_size=10, extra_s=0.6)


SAID = [
    (
        120e9,
        [],
        [ASKED],
        r"^A GPU needs 100 GB: 60 for .*40 for activations\. That fits into 120 GB, of which a tenth stays free, "
        r"and so does any batch_size_per_rank up to 12\.$",
        12,
    ),
    (
        90e9,
        [FEWER, SHARED],
        [FEWER, AGAIN],
        r"That does not fit into 90 GB.* Try, in this order: b=5 \(saves 20 GB, no extra time, fits\), x=node \(saves "
        r"10 GB, 5\.0% more time\)\. The shortest list of settings that fits: b=5 \(80 GB, no extra time\)\. Without a "
        r"smaller batch: x=node y=true \(60 GB, 30\.0% more time\)\.$",
        5,
    ),
    (
        10e9,
        [SHARED],
        [],
        r"Neither a combination of these nor a pipeline in a node fits\. Use a smaller network or larger GPUs\.$",
        0,
    ),
    (None, [], [ASKED], r"set cluster\.gpu_memory_bytes=<bytes>\.$", None),
]


@pytest.mark.parametrize(("memory_bytes", "alone", "fitting", "words", "largest_batch"), SAID)
def test_what_fits_is_said_or_what_each_setting_saves_and_the_smallest_list(
    memory_bytes, alone, fitting, words, largest_batch
):
    result = MemoryReport(
        state=STATE,
        blocks=tuple(traced_blocks(nn.Linear(4, 4), (4,))),
        asked=ASKED,
        alone=tuple(alone),
        fitting=tuple(fitting),
        memory_bytes=memory_bytes,
        largest_batch=largest_batch,
        step_s=2.0,
    )
    assert re.search(words, result.sentence((), "GPU"))


def choices_of(asked: Scenario, usable_bytes=None, **options):
    blocks = blocks_of_known("resnet50")
    return pipeline_choices(asked, blocks, STATE, usable_bytes=usable_bytes, **options)


@pytest.mark.parametrize(("cluster", "num_nodes"), [("p40_roce", 1), ("dgx_h100", 16)])
def test_for_resnet_50_data_parallelism_pays_as_pipedreams_planner_said(cluster, num_nodes):
    result = scenario(cluster=cluster_of(cluster, num_nodes))
    choices = choices_of(result)
    assert len(choices) > 4
    steps_s = [choice.step_s for choice in choices]
    assert steps_s == sorted(steps_s)
    sentence = what_pays(choices, result.run().step_s)
    assert sentence.startswith("Data parallelism is faster: the best pipeline, with 2 ranks in")


def test_a_pipeline_pays_where_weights_are_many_and_links_slow():
    """Eight layers of 4096 x 4096 on a node at 1 GB/s have 268 MB of gradients, and 16 kB per image between layers."""
    shape = (1, 64, 64)
    network = on_meta(
        lambda: nn.Sequential(nn.Flatten(), *[nn.Linear(4096, 4096) for _ in range(8)])
    )
    slow = replace(cluster_of("p40_roce", 1), inside=Link(latency_s=0.0, bytes_per_s=1e9))
    layers = tuple(layers_of(network, shape))
    result = scenario(cluster=slow, layers=layers, images_per_s=2000.0)
    choices = pipeline_choices(result, traced_blocks(network, shape), STATE, usable_bytes=None)
    sentence = what_pays(choices, result.run().step_s)
    assert sentence.startswith("A pipeline is faster: with 8 ranks in a node (")
    best = choices[0]
    words = f"strategy=pipeline strategy.num_stages=8 {' '.join(best.settings[2:])}, in batches of 512 images."
    assert sentence.endswith(f"To train with it: {words}")
    images = 8 * 64
    assert best.step_s >= images / 2000 / 8  # no faster than its arithmetic
    assert best.sent_bytes == (4096 * 2 * images,) * 7


def test_recomputing_blocks_needs_less_memory_and_a_third_more_time_and_what_needs_too_much_is_left_out():
    result = scenario(cluster=cluster_of("p40_roce", 1))
    free = choices_of(result)

    def of_two_ranks(choices):
        for choice in choices:
            if (choice.schedule, choice.num_ranks, choice.num_microbatches) == ("1f1b", 2, 16):
                return choice
        raise AssertionError("there is no such choice")

    plain = of_two_ranks(free)
    recomputed = of_two_ranks(choices_of(result, recomputes=True))
    assert recomputed.most_bytes < plain.most_bytes
    assert recomputed.step_s == pytest.approx(4 / 3 * plain.step_s, rel=0.05)
    assert recomputed.settings[-1] == "strategy.checkpoint_activations=true"
    room = 0.5 * max(choice.most_bytes for choice in free)
    fitting = choices_of(result, usable_bytes=room)
    assert 0 < len(fitting) < len(free)
    assert all(choice.most_bytes <= room for choice in fitting)


def test_gradients_of_a_stage_travel_over_the_ranks_that_have_it():
    """Two ranks form one pipeline, in which no other rank has either stage. A second node has both stages again.

    A stage's million half-precision gradients take 2 s between two nodes at 1 MB/s, and both stages share the card.
    """
    slow = Link(latency_s=0.0, bytes_per_s=1e6)
    two = replace(cluster_of("p40_roce", 1), ranks_per_node=2, across=slow)
    network = on_meta(lambda: nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 1000)))
    blocks = traced_blocks(network, (1000,))
    one_node = scenario(cluster=two, batch_size_per_rank=1)
    two_nodes = replace(one_node, cluster=two.of(2))
    alone, *_ = pipeline_choices(one_node, blocks, STATE, usable_bytes=None)
    shared, *_ = pipeline_choices(two_nodes, blocks, STATE, usable_bytes=None)
    assert alone.step_s < 0.1
    # 0.94 of the line rate is payload.
    assert shared.step_s == pytest.approx(2 * 2.002 / 0.94, rel=0.05)


def peaks(**options):
    """Return the predicted and the tracked peak bytes of a step of 16 texts with 64 tokens, by torch's tracker."""
    torch.manual_seed(0)
    with WithoutValues():
        on_meta = Bert(**options)
    state = StateBytes.of(precision="32-true", optimizer="lamb", copies_gradients=False)
    predicted = state.per_parameter() * sum(map(torch.numel, on_meta.parameters()))
    predicted += step_bytes(on_meta, [64], batch_size=16, precision="32-true")
    model = Bert(**options)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = LAMB(model.parameters(), lr=1e-3)
    tracker = MemTracker()
    optimizer.step()
    tracker.track_external(model, optimizer, *(parameter.grad for parameter in model.parameters()))
    text = model.example(16, 64, device="cpu")
    with tracker:
        logits = model(text).float()
        cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64)).backward()
        optimizer.step()
    return predicted, tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


def test_the_peak_of_a_step_of_bert_is_that_of_torch_s_tracker_within_5_percent():
    """This is a real CPU step, with and without activation checkpointing. The shared embedding is counted once."""
    pytest.importorskip("transformers")
    small = {
        "num_classes": 1000,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
    }
    options = {"intermediate_size": 256, **small}
    predicted, tracked = peaks(checkpoint_activations=False, **options)
    assert 0.95 < predicted / tracked < 1.05
    predicted_checkpointed, tracked_checkpointed = peaks(checkpoint_activations=True, **options)
    assert 0.95 < predicted_checkpointed / tracked_checkpointed < 1.05
    assert tracked_checkpointed < 0.6 * tracked
    with WithoutValues():
        network = Bert(**small)
    num_parameters = sum(map(torch.numel, network.parameters()))
    assert sum(sum(layer.numels) for layer in layers_of(network, (64,))) == num_parameters


def test_bert_is_cut_between_its_layers_and_both_stages_of_the_shared_embedding_hold_it():
    """All hidden states cross a cut, and the gradient of the embedding passes between both stages once per step."""
    pytest.importorskip("transformers")
    small = {
        "num_classes": 1000,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    with WithoutValues():
        network = Bert(**small, intermediate_size=256)
    blocks = traced_blocks(network, (64,))
    layers = [f"network.bert.encoder.layer.{index}" for index in range(2)]
    assert [block.name for block in blocks] == ["network.bert.embeddings", *layers, "network.cls"]
    assert [block.num_tied for block in blocks] == [0, 0, 0, 64_000]
    assert sum(sum(block.numels) for block in blocks) == sum(map(torch.numel, network.parameters()))
    for block in blocks[1:]:
        assert block.input_bytes == 64 * 64 * 2 + 9 * 8, "hidden states, and the masked positions"
    slow = Link(latency_s=0.0, bytes_per_s=1e6)
    two = replace(cluster_of("p40_roce", 1), ranks_per_node=2, inside=slow)
    result = scenario(cluster=two, batch_size_per_rank=1)
    untied = [replace(block, num_tied=0) for block in blocks]
    best, *_ = pipeline_choices(result, blocks, STATE, usable_bytes=None)
    best_untied, *_ = pipeline_choices(result, untied, STATE, usable_bytes=None)
    assert best.step_s - best_untied.step_s == pytest.approx(2 * 64_000 / 1e6)
    extra_bytes = sum(best.rank_bytes) - sum(best_untied.rank_bytes)
    assert extra_bytes == pytest.approx(STATE.per_parameter() * 64_000)


def test_the_answer_orders_what_to_try(monkeypatch):
    ask = ["num_nodes=2", "search=null", "scaling_ranks=[]", "batch_size_per_rank=512"]
    result = reported(monkeypatch, *ask)
    assert "does not fit into 24 GB" in result.answer()
    tried = re.findall(
        r"([\w.=]+) \(saves ([\d.]+) GB, (?:at least )?(no extra|[\d.]+% more) time(, fits)?\)",
        result.answer(),
    )
    assert [(name, bool(fits)) for name, _, _, fits in tried] == [
        ("batch_size_per_rank=256", True),
        ("strategy.shard_update=world", False),
        ("strategy=fsdp2", False),
        ("strategy.shard_update=node", False),
        ("strategy.offload=true", False),
        ("model.checkpoint_activations=true", True),
    ]
    more_time_percent = float(tried[-1][2].removesuffix("% more"))
    # One forward pass of a step that waits a little for gradients.
    assert 30 < more_time_percent < 100 / 3
    assert re.search(
        r"The shortest list of settings that fits: batch_size_per_rank=256 \([\d.]+ GB, no extra time\)",
        result.answer(),
    )
    assert "| as configured " in result.markdown()
    assert (
        "Data parallelism is faster: the best pipeline, with 2 ranks in a node (" in result.answer()
    )


def test_bert_base_on_a_card_of_12_gb_is_answered_from_one_line(monkeypatch):
    pytest.importorskip("transformers")
    quick = "search=null", "scaling_ranks=[]"
    result = reported(monkeypatch, "model=bert_base", "cluster.gpu_memory_bytes=12e9", *quick)
    assert re.search(
        r"A GPU needs [\d.]+ GB: 1\.76 for 109\.5 million parameters.* does not fit into 12 GB",
        result.answer(),
    )
    assert re.search(
        r"The shortest list of settings that fits: batch_size_per_rank=8 \(7\.\d+ GB, no extra time\)",
        result.answer(),
    )


def tracked_bytes(model, *, batch_size, precision):
    """Return the peak bytes of forward and backward by torch's tracker, of the tensors that `step_bytes` counts."""
    with meta_step(model, precision) as (shadow, _):
        texts = model.example(batch_size, 64, device="meta")
        inputs = list(tree_iter(texts))
        tracker = MemTracker()
        tracker.track_external(shadow, *inputs)
        with tracker:
            activations._forward_and_backward(shadow, texts)  # exactly what `step_bytes` runs
        external = [*shadow.parameters(), *shadow.buffers(), *inputs]
        external_bytes = sum(map(nbytes, external))  # parameters are fp32 again after this block
        peak = tracker.get_tracker_snapshot("peak")[torch.device("meta")]["Total"]
    return peak - external_bytes + 2 * sum(map(nbytes, inputs))


@pytest.mark.long  # the test of BERT's peak above covers the whole step
@pytest.mark.filterwarnings("ignore")  # torch's tracker warns about gradients that are None
def test_activations_of_each_list_of_settings_are_those_of_torch_s_tracker_within_5_percent(
    monkeypatch,
):
    """The settings of a small BERT change the precision, the batch and activation checkpointing."""
    pytest.importorskip("transformers")
    small = {
        "num_classes": 1000,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 256,
    }
    ask = [
        *(f"model.{name}={size}" for name, size in small.items()),
        "image_shape=[64]",
        "batch_size_per_rank=16",
        "num_nodes=1",
        "model=bert_base",
        "precision=32-true",
        "cluster.gpu_memory_bytes=2e7",
        "search=null",
        "scaling_ranks=[]",
    ]
    memory = reported(monkeypatch, *ask).memory
    assert {need.settings[0] for need in memory.alone} == {
        "batch_size_per_rank=8",
        "precision=16-true",
        "model.checkpoint_activations=true",
        "strategy.shard_update=world",
        "strategy=fsdp2",
        "strategy=fsdp2 strategy.offload=true",
    }
    assert memory.fitting
    tracked = cache(tracked_bytes)
    networks = {}
    for is_checkpointed in (False, True):
        with WithoutValues():
            networks[is_checkpointed] = Bert(**small, checkpoint_activations=is_checkpointed)
    for need in (memory.asked, *memory.alone, *memory.fitting):
        precision, is_checkpointed = need.kind
        expected = tracked(
            networks[is_checkpointed], batch_size=need.batch_size, precision=precision
        )
        assert need.activation_bytes == pytest.approx(expected, rel=0.05), need
