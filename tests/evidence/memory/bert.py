"""Peak memory of a step of BERT by torch's memory tracker, beside the planner's.

    python -m tests.evidence.memory.bert cpu 8 512 [0 1]   device, sequences, tokens of each, checkpointing

A step between two: moments and gradients are there before it. On `meta` nothing is computed, all else is done.
"""

from __future__ import annotations

import csv
import sys

import torch
import torch.nn.functional as F
from torch.distributed._tools.mem_tracker import MemTracker

from lightning_hybrid.optim import LAMB
from lightning_hybrid.planning.memory import StateBytes
from recipes.networks.bert import Bert
from recipes.planning.activations import step_bytes
from recipes.planning.layers import WithoutValues


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
        logits = model(text)
        F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64, device=device)).backward()
        del logits
        optimizer.step()
    return tracker.get_tracker_snapshot("peak")[torch.device(device)]["Total"]


def row(device: str, num_sequences: int, length: int, **options: int) -> dict[str, object]:
    """Predicted and measured bytes."""
    torch.manual_seed(0)
    with WithoutValues():
        on_meta = Bert(**options)
    state = StateBytes.of(precision="32-true", optimizer="lamb", copies_gradients=False)
    num_parameters = sum(one.numel() for one in on_meta.parameters())
    acts = step_bytes(on_meta, [length], batch_size=num_sequences, precision="32-true")
    predicted = state.per_parameter() * num_parameters + acts
    measured = tracked(Bert(**options) if device == "cpu" else on_meta, device, num_sequences, length)
    return {
        "device": device,
        "sequences": num_sequences,
        "tokens": length,
        "checkpointing": options.get("checkpoint_activations", 0),
        "parameters": num_parameters,
        "predicted_bytes": round(predicted),
        "measured_bytes": measured,
        "ratio": round(predicted / measured, 4),
    }


def main() -> None:
    """Print a line without and one with activation checkpointing."""
    device, num_sequences, length = sys.argv[1], *map(int, sys.argv[2:4])
    for checkpointing in map(int, sys.argv[4:] or (0, 1)):
        found = row(device, num_sequences, length, checkpoint_activations=checkpointing)
        writer = csv.DictWriter(sys.stdout, found)
        writer.writeheader()
        writer.writerow(found)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
