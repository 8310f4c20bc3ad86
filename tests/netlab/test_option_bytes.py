"""Bytes that options send, from kernel counters: sharded updates, sliced layers, pipelines, local steps."""

import itertools
import math
import statistics
import time

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from lightning_hybrid import Comm, LocalSteps, Mean
from lightning_hybrid.comm import CommPlan
from lightning_hybrid.contrastive import InfoNCE, SigLIP
from lightning_hybrid.optim import LARS
from lightning_hybrid.pipeline.rank_layout import PipelineRanks
from lightning_hybrid.pipeline.shapes import boundary_of
from lightning_hybrid.strategy.node_slices.slice_exchange import NodeRanks
from lightning_hybrid.strategy.node_slices.sliced_fit import cut_
from tests.netlab.cluster import Cluster
from tests.netlab.test_bytes import NUM_BYTES, TOLERANCE, counted, engine_of, sent
from tests.pipeline.schedule_step import step_over
from tests.scenes import at, fit

pytestmark = pytest.mark.long


def counted_again(step):
    """Count the bytes that this host sends over its loopback in a second step, when all connections are open."""
    step()
    return counted(step)[1]


# ---- sharded update within a node ------------------------------------------------------------------------------------


def sent_for_updates(scope):
    """Count a host's bytes for gradients with `two_level`, and for gradients and weights of a sharded update."""
    engine = engine_of(CommPlan(algorithm="two_level"), shares_update=scope)
    gradients = torch.ones(NUM_BYTES // 2, dtype=torch.float16)
    weights = torch.ones(NUM_BYTES // 2, dtype=torch.float16)

    def whole():
        engine.submit(gradients, bucket_index=0).wait()

    def shared():
        engine.submit(gradients, bucket_index=1, keeps_shard=True).wait()
        engine.submit(weights, bucket_index=0, exchange=f"{scope}_gather").wait()

    # In the first all-reduce, the ranks also compare what they submit.
    whole()
    shared()
    bytes_whole = counted(whole)
    bytes_shared = counted(shared)
    engine.close()
    return bytes_whole, bytes_shared


@pytest.mark.parametrize("scope", ["node", "world"])
def test_a_shared_update_sends_the_bytes_of_two_level(cluster_or_skip, scope):
    with Cluster(num_hosts=2, ranks_per_host=2, mbit_per_s=2000) as cluster:
        for whole, shared in cluster.call(sent_for_updates, scope, timeout_s=180):
            assert shared == pytest.approx(whole, rel=TOLERANCE)  # between nodes, and inside


NUM_LAYERS = 8
LAYER_S = 0.08
WIDTH = 512
NUM_BATCHES = 24


class Deep(pl.LightningModule):
    """Network whose last bucket, which every rank receives whole, contains only the small first layer."""

    kind = nn.Linear

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, WIDTH))
        for _ in range(NUM_LAYERS):
            self.net.append(self.kind(WIDTH, WIDTH))

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        # This optimizer only needs the gradients of its own shard.
        return LARS(self.parameters(), lr=0.1, fused=True)


def fit_of_deep(module, looks, **options):
    images = DataLoader(torch.randn(NUM_BATCHES, 8), batch_size=1)
    comm = Comm(plan=CommPlan(algorithm="two_level", bucket_bytes=2 * WIDTH**2))
    options |= {
        "precision": "16-true",
        "loss_scale": 1,
        "comm": comm,
        "train": images,
        "max_epochs": 1,
        "use_distributed_sampler": False,
    }
    return fit(None, module, callbacks=looks, **options)


def sent_before_third_and_last_step(trainer, module, batch, batch_idx):
    if batch_idx in (2, NUM_BATCHES - 1):
        across, _ = sent()
        return across
    return None


def sent_by_steps():
    """Return the bytes per step between hosts from the third step to the last, by value of the option."""
    bytes_of_step = {}
    for scope in ("off", "world"):
        looks = at(on_train_batch_start=sent_before_third_and_last_step)
        seen = fit_of_deep(Deep, looks, shard_update=scope)
        begin, end = seen.looks["on_train_batch_start"]
        bytes_of_step[scope] = (end - begin) / (NUM_BATCHES - 3)
    return bytes_of_step


def test_a_step_shared_by_all_sends_the_two_halves_of_an_all_reduce(cluster_or_skip):
    """A step sends 2 (n - 1) / n of all half-precision weights: it scatters gradients and gathers weights."""
    with Cluster(num_hosts=4, ranks_per_host=1, mbit_per_s=2000) as cluster:
        results = cluster.call(sent_by_steps, timeout_s=180)
    whole = max(of_rank["off"] for of_rank in results)
    shared = max(of_rank["world"] for of_rank in results)
    claim = 2 * 3 / 4 * 2 * sum(parameter.numel() for parameter in Deep().parameters())
    print(
        f"a step sends {shared:,.0f} bytes, {shared / claim:.4f} of the formula; not shared {whole / claim:.4f}"
    )
    # Barriers, decisions and checksums of four ranks.
    assert claim <= shared <= claim * (1 + TOLERANCE) + 2**16
    assert shared == pytest.approx(whole, rel=TOLERANCE)


# ---- weights that arrive during forward ------------------------------------------------------------------------------


class Waits(nn.Linear):
    """Layer that takes time without using the processor, like a layer on a device."""

    def forward(self, x):
        time.sleep(LAYER_S)
        return super().forward(x)


class Slow(Deep):
    kind = Waits


def take_turns(trainer, module, batch, batch_idx):
    """Time three steps that wait for the gather at once, and three that wait during forward."""
    shared = trainer.strategy._extensions.members[0]._sharded_fit
    if batch_idx == 0:
        shared.late = shared._late
        shared.gathers_s = []
        gather_ = shared.exchange.gather_

        def timed(*args, **options):
            begin_s = time.perf_counter()
            gather_(*args, **options)
            shared.gathers_s.append(time.perf_counter() - begin_s)

        shared.exchange.gather_ = timed
    shared._late = shared.late if batch_idx // 3 % 2 else None
    return time.perf_counter(), shared.gathers_s


def seconds_of_steps():
    """Return the medians of steps that wait for the gather, of that gather, and of steps that wait in forward."""
    looks = at(on_train_batch_start=take_turns)
    seen = fit_of_deep(Slow, looks, shard_update="world")
    times_s, (gathers_s, *_) = zip(*seen.looks["on_train_batch_start"], strict=True)
    steps_s = [after - before for before, after in itertools.pairwise(times_s)]
    # The gather before the first of three steps was of the other kind, and the first three steps compare what they
    # submit.
    at_once_s = []
    gather_s = []
    late_s = []
    for index in range(3, NUM_BATCHES - 1):
        if index % 3 == 0:
            continue
        if index // 3 % 2 == 0:
            at_once_s.append(steps_s[index])
            gather_s.append(gathers_s[index])
        else:
            late_s.append(steps_s[index])
    return [statistics.median(times_s) for times_s in (at_once_s, gather_s, late_s)]


@pytest.mark.clock
def test_forward_hides_the_gather_of_weights(cluster_or_skip):
    """Of 4 MiB, each host sends half at 40 Mbit/s, which takes 0.4 s and is hidden by a forward pass of 0.6 s."""
    with Cluster(num_hosts=2, ranks_per_host=1, mbit_per_s=40, delay_us=200) as cluster:
        at_once_s, gather_s, late_s = cluster.call(seconds_of_steps, timeout_s=300)[0]
    hidden = (at_once_s - late_s) / gather_s
    print(
        f"a step {at_once_s:.3f} s with a gather of {gather_s:.3f} s, {late_s:.3f} s with {hidden:.0%} of it hidden"
    )
    assert hidden > 0.5


# ---- layers sliced across the ranks of a node ------------------------------------------------------------------------

# fc6, fc7 and fc8 of AlexNet with a quarter of their features in fp16, and a quarter of 64 images on each of eight
# ranks. All bytes are those of the whole network divided by 16.
NUM_SLICES = 8
NUM_IMAGES = 16
NUM_INPUTS = 2304
NUM_FEATURES = 1024
NUM_CLASSES = 256


def sent_by_slices():
    """Return the bytes of the pair, of pair and head, and of the all-reduce of the gradients of whole layers."""
    torch.manual_seed(0)
    layers = [(NUM_INPUTS, NUM_FEATURES), (NUM_FEATURES, NUM_FEATURES), (NUM_FEATURES, NUM_CLASSES)]
    net = nn.Sequential(*(nn.Linear(*sizes) for sizes in layers)).half()
    gradients = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    cut_(net, [("0", "1"), ("2",)], NodeRanks(dist.group.WORLD))
    fc6, fc7, fc8 = net
    images = torch.randn(NUM_IMAGES, NUM_INPUTS).half().requires_grad_()
    return [
        counted_again(lambda: fc7(fc6(images).relu()).sum().backward()),
        counted_again(lambda: fc8(fc7(fc6(images).relu())).sum().backward()),
        counted_again(lambda: dist.all_reduce(gradients)),
    ]


def test_slices_send_their_images_and_no_gradients(cluster_or_skip):
    """Each rank sends 2 (g - 1) b (n_in + n_out) elements. Whole layers would send 2 (g - 1) / g of all weights."""
    with Cluster(num_hosts=1, ranks_per_host=NUM_SLICES, mbit_per_s=1000) as cluster:
        result = cluster.call(sent_by_slices, timeout_s=300)
    pair, cut, whole = (max(of_ranks) for of_ranks in zip(*result, strict=True))
    rows = NUM_SLICES * 2 * (NUM_SLICES - 1) * NUM_IMAGES * 2
    claim_of_pair = rows * (NUM_INPUTS + NUM_FEATURES)
    claim_of_cut = rows * (NUM_INPUTS + 2 * NUM_FEATURES + NUM_CLASSES // NUM_SLICES)
    # Barriers and image counts of eight ranks.
    assert claim_of_pair <= pair <= claim_of_pair * (1 + TOLERANCE) + 2**19
    assert claim_of_cut <= cut <= claim_of_cut * (1 + TOLERANCE) + 2**19
    whole_fc8 = NUM_SLICES * 2 * (NUM_SLICES - 1) / NUM_SLICES * NUM_FEATURES * NUM_CLASSES * 2
    assert whole / (pair + whole_fc8) == pytest.approx(5.4, rel=0.05)
    assert whole / cut == pytest.approx(6.5, rel=0.05)


# A language model on four ranks with 8 sequences of 32 tokens on each, in fp32, with BERT's vocabulary.
NUM_TOKENS = 8 * 32
HIDDEN = 768
VOCABULARY = 30_522
NUM_SHARING = 4


def sent_by_transformers():
    """Return the bytes of attention, feed-forward, a head's input, losses over its logits, and gathered logits."""
    layer = nn.TransformerEncoderLayer(HIDDEN, 12, 4 * HIDDEN, batch_first=True)
    ends = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY))
    net = nn.Sequential(layer, ends)
    ranks = NodeRanks(dist.group.WORLD)
    groups = [
        ("0.self_attn", "0.self_attn.out_proj"),
        ("0.linear1", "0.linear2"),
        ("1.0",),
        ("1.1",),
    ]
    cut_(net, groups, ranks)
    x = torch.randn(8, 32, HIDDEN, requires_grad=True)
    tokens = torch.randint(VOCABULARY, (8, 32))
    logits = torch.randn(NUM_SHARING * 8, 32, -(-VOCABULARY // NUM_SHARING), requires_grad=True)
    losses_of = vars(ends[1])["sliced"].losses_of
    whole = [torch.empty_like(logits) for _ in range(NUM_SHARING)]
    return [
        counted_again(lambda: layer._sa_block(x, None, None).sum().backward()),
        counted_again(lambda: layer._ff_block(x).sum().backward()),
        counted_again(lambda: ranks.gather(x).sum().backward()),  # as a head does
        counted_again(lambda: losses_of(logits, tokens).sum().backward()),
        counted_again(lambda: dist.all_gather(whole, logits.detach())),
    ]


def test_transformers_send_what_the_formula_of_tensor_parallelism_says_and_losses_no_logits(
    cluster_or_skip,
):
    """Attention and feed-forward each reduce all tokens twice, in forward and backward. A head sends half of that."""
    with Cluster(num_hosts=1, ranks_per_host=NUM_SHARING, mbit_per_s=1000) as cluster:
        result = cluster.call(sent_by_transformers, timeout_s=300)
    attention, feed_forward, head, losses, logits = (
        max(of_ranks) for of_ranks in zip(*result, strict=True)
    )
    # Over all ranks. Torch's all-reduce sends 2 (g - 1) / g.
    pair = 4 * (NUM_SHARING - 1) * NUM_SHARING * NUM_TOKENS * HIDDEN * 4
    assert attention == pytest.approx(pair, rel=TOLERANCE)
    assert feed_forward == pytest.approx(pair, rel=TOLERANCE)
    assert head == pytest.approx(pair / 2, rel=TOLERANCE)
    assert logits / losses > 1000


# ---- a pipeline: one tensor forward and its gradient back for each cut -----------------------------------------------

NUM_RANKS = 4
NUM_MICROBATCHES = 8
SHAPE = (4, 128, 28, 28)  # 4 images behind the second stage of ResNet-50, channels-last in fp16
STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2}


class Scales(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float16))

    def forward(self, x):
        return x * self.weight


def sent_by_schedules():
    boundary = boundary_of(torch.empty(SHAPE).half().to(memory_format=torch.channels_last))
    bytes_by_schedule = {}
    for schedule, parts in STAGES_PER_RANK.items():
        ranks = PipelineRanks(
            rank=dist.get_rank(), world_size=NUM_RANKS, num_ranks=NUM_RANKS, stages_per_rank=parts
        )
        blocks = {stage: Scales() for stage in ranks.stages}
        cut = {"num_stages": ranks.num_stages, "num_microbatches": NUM_MICROBATCHES}
        with step_over(schedule, blocks, boundary, **cut) as step:
            bytes_by_schedule[schedule] = counted_again(step)
    return bytes_by_schedule


def test_a_step_sends_each_cuts_tensor_and_its_gradient_once_for_each_micro_batch(cluster_or_skip):
    """A step sends 2 M (v S - 1) tensors. Two interleaved stages per rank send (2 S - 1) / (S - 1) times as much."""
    with Cluster(num_hosts=1, ranks_per_host=NUM_RANKS, mbit_per_s=1000) as cluster:
        of_ranks = cluster.call(sent_by_schedules, timeout_s=300)
    for schedule, parts in STAGES_PER_RANK.items():
        claim = 2 * NUM_MICROBATCHES * (parts * NUM_RANKS - 1) * math.prod(SHAPE) * 2
        result = max(of_rank[schedule] for of_rank in of_ranks)
        # Barriers and messages of the watchdog.
        assert claim <= result <= claim * (1 + TOLERANCE) + 2**16


# ---- losses over the pairs of all ranks ------------------------------------------------------------------------------

PAIRS = 4096
FEATURES = 128
# Multiplied by N (W - 1) / W for each rank.
FORMULAS = {"InfoNCE": 16 * FEATURES + 8, "SigLIP": 12 * FEATURES}


def sent_by_losses():
    bytes_by_loss = {}
    for name, loss in (("InfoNCE", InfoNCE()), ("SigLIP", SigLIP())):
        views = [torch.randn(PAIRS // NUM_RANKS, FEATURES, requires_grad=True) for _ in range(2)]
        bytes_by_loss[name] = counted_again(lambda loss=loss, views=views: loss(*views).backward())
    return bytes_by_loss


def test_losses_send_what_their_formulas_say(cluster_or_skip):
    with Cluster(num_hosts=1, ranks_per_host=NUM_RANKS, mbit_per_s=1000) as cluster:
        of_ranks = cluster.call(sent_by_losses, timeout_s=300)
    for name, formula in FORMULAS.items():
        claim = (NUM_RANKS - 1) * PAIRS * formula  # over all ranks, which share a host
        most = max(of_rank[name] for of_rank in of_ranks)
        assert claim <= most <= claim * (1 + TOLERANCE) + 2**16


# ---- local steps: two reductions of weights in H steps, in fp32 or through a codec -----------------------------------

HOSTS = 4
RANKS_PER_HOST = 2
LAYER_WIDTH = 2048
NUM_STEPS = 16
# Bytes that a node sends per byte reduced across nodes, and bytes of state and signals over all steps.
SENT = 2 * (HOSTS - 1) / HOSTS
WORDS = 100_000


class OneLayer(pl.LightningModule):
    """Layer with enough weights that gradients and momentum matter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(LAYER_WIDTH, LAYER_WIDTH, bias=False)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def sent_across(*args):
    across, _ = sent()
    return across


def sent_across_after_last_step(trainer, *args):
    if trainer.global_step == NUM_STEPS:
        return sent_across()
    return None


def sent_by_fits():
    """Return the bytes between hosts from the first step to the last, for gradients and for three kinds of averages."""
    results = []
    train = DataLoader(torch.randn(NUM_STEPS * HOSTS * RANKS_PER_HOST, LAYER_WIDTH), batch_size=1)
    # In small chunks, 4-bit messages have a few KiB, of which headers are some per cent.
    comm = Comm(plan=CommPlan(algorithm="two_level", chunk_bytes=2**22))
    looks = at(on_train_start=sent_across, on_train_batch_end=sent_across_after_last_step)
    options = {"comm": comm, "precision": "16-true", "max_steps": NUM_STEPS, "callbacks": looks}
    for between_nodes in (
        Mean(),
        LocalSteps(every=8, dtype=None),
        LocalSteps(every=8, dtype="int8"),
        LocalSteps(every=8, dtype="int4"),
    ):
        seen = fit(None, OneLayer, train=train, between_nodes=between_nodes, **options)
        results.append(seen.looks["on_train_batch_end"][0] - seen.looks["on_train_start"][0])
    return results


def test_nodes_send_weights_and_momentum_once_in_eight_steps(cluster_or_skip):
    """In 8 bits, they send an eighth of the bytes of fp16 gradients in every step."""
    num_averages = NUM_STEPS / 8
    # Bytes per element: gradients in fp16, then weights and momentum in fp32, in 8 bits and in 4 bits.
    bytes_of_element = [
        2 * NUM_STEPS,
        2 * 4 * num_averages,
        2 * 258 / 256 * num_averages,
        2 * 130 / 256 * num_averages,
    ]
    expected = [WORDS + SENT * LAYER_WIDTH**2 * num_bytes for num_bytes in bytes_of_element]
    with Cluster(num_hosts=HOSTS, ranks_per_host=RANKS_PER_HOST, mbit_per_s=2000) as cluster:
        results = cluster.call(sent_by_fits, timeout_s=300)
    for rank, of_rank in enumerate(results):
        assert of_rank == pytest.approx(expected, rel=TOLERANCE), f"rank {rank}"
        assert of_rank[2] / of_rank[0] == pytest.approx(1 / 8, rel=TOLERANCE), f"rank {rank}"
