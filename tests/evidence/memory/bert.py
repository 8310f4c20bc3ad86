"""Peak memory of a step of BERT by torch's memory tracker, next to the planner's.

    python -m tests.evidence.memory.bert cpu 8 512 32-true       device, sequences, tokens of each, precision
    python -m tests.evidence.memory.bert meta 8 512 16-true checkpointing

A step between two: moments and gradients are there before it. On `meta` nothing is computed, all else is done. Of half
precision activations and weights are tracked; gradients, masters and moments are those of recipes/records/memory.
"""

import csv
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker

from lightning_hybrid.optim import LAMB
from recipes.networks.bert import Bert
from recipes.planning.activations import step_bytes, tracked_bytes
from recipes.planning.estimates.memory import StateBytes
from recipes.planning.layers import WithoutValues


def loss_of(model: Any, text: Any) -> Tensor:
    """The loss of masked tokens."""
    logits = model(text).float()
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64, device=logits.device))


def peak(tracker: MemTracker, device: str) -> int:
    """Bytes at the peak."""
    return tracker.get_tracker_snapshot("peak")[torch.device(device)]["Total"]


def tracked(model: Bert, device: str, num_sequences: int, length: int) -> int:
    """Bytes at the peak of forward, backward and update in fp32."""
    for one in model.parameters():
        one.grad = torch.zeros_like(one)
    optimizer = LAMB(model.parameters(), lr=1e-3)
    optimizer.step()
    tracker = MemTracker()
    tracker.track_external(model, optimizer, *(one.grad for one in model.parameters()))
    text = model.example(num_sequences, length, device=device)
    with tracker:
        loss_of(model, text).backward()
        optimizer.step()
    return peak(tracker, device)


def row(device: str, num_sequences: int, length: int, precision: str = "32-true", **options: Any) -> dict[str, Any]:
    """Predicted and measured bytes; `options` as in `Bert`."""
    torch.manual_seed(0)
    with WithoutValues():
        on_meta = Bert(**options)
    bytes_each = StateBytes.of(precision=precision, optimizer="lamb", copies_gradients=False).per_parameter()
    state = bytes_each * sum(one.numel() for one in on_meta.parameters())
    predicted = state + step_bytes(on_meta, [length], batch_size=num_sequences, precision=precision)
    if precision == "32-true":
        measured = tracked(Bert(**options) if device == "cpu" else on_meta, device, num_sequences, length)
    else:
        measured = state + tracked_bytes(on_meta, [length], batch_size=num_sequences, precision=precision)
    return {
        "device": device,
        "sequences": num_sequences,
        "tokens": length,
        "precision": precision,
        "checkpointing": options.get("checkpoint_activations", False),
        "state_bytes": round(state),
        "predicted_bytes": round(predicted),
        "measured_bytes": round(measured),
        "ratio": round(predicted / measured, 4),
    }


if __name__ == "__main__":
    found = row(sys.argv[1], *map(int, sys.argv[2:4]), sys.argv[4], checkpoint_activations="checkpointing" in sys.argv)
    writer = csv.DictWriter(sys.stdout, found)
    writer.writeheader()
    writer.writerow(found)
