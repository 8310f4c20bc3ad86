"""Report on gradient compression between nodes, as a sentence and a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from lightning_hybrid.comm.plan import CommPlan
from lightning_hybrid.formatting import time_text
from lightning_hybrid.planning.estimates.compression import (
    WireStep,
    compressed_steps,
    proposed,
    wire_step,
)
from lightning_hybrid.planning.model.cluster import Cluster
from lightning_hybrid.planning.model.simulate import SimulatedSteps
from lightning_hybrid.planning.model.workload import StepWorkload


@dataclass(frozen=True, kw_only=True)
class CompressionReport:
    """Comparison of simulated steps with and without gradient compression between nodes.

    Args:
        plain: Best step without compression.
        steps: Steps with fewer bits, in descending order of bits.
        is_measured: Whether the codec's own time was measured.
    """

    plain: WireStep
    steps: tuple[WireStep, ...]
    is_measured: bool

    @classmethod
    def of(
        cls,
        plain: SimulatedSteps,
        work: StepWorkload,
        cluster: Cluster,
        plans: Sequence[CommPlan],
        *,
        itemsize: int,
        on_cuda: bool,
    ) -> CompressionReport | None:
        """Simulate a step for each compressed format, each with its best plan.

        Returns None for a single node.
        """
        if cluster.num_nodes == 1:
            return None
        return cls(
            plain=wire_step(plain, cluster, itemsize=itemsize, name=None),
            steps=compressed_steps(work, cluster, plans, itemsize=itemsize, on_cuda=on_cuda),
            is_measured=cluster.codec.is_measured,
        )

    @property
    def proposal(self) -> str | None:
        """Value of `comm_dtype_across_nodes` that clearly shortens a step, or None if no value does."""
        found = proposed(self.plain, self.steps)
        return None if found is None else found.name

    def sentence(self) -> str:
        """Return a sentence that says whether compression shortens a step.

        The sentence compares the exposed communication with the time that the codec takes.
        """
        plain = self.plain
        proposal = self.proposal
        codec_s = max(step.codec_s for step in self.steps)
        others = ", ".join(f"{time_text(step.step_s)} with {step.name}" for step in self.steps)
        why = (
            f"a step takes {time_text(plain.step_s)}, of which {time_text(plain.exposed_s)} are exposed communication, "
            f"and {others}; rounding takes {time_text(codec_s)}{'' if self.is_measured else ', not measured'}"
        )
        if proposal is None:
            return f"Gradient compression between nodes would not pay off: {why}."
        return (
            f"Gradient compression between nodes would pay off: {why}. Compression changes the results of training, so "
            f"it is off by default. To use it, set strategy.between_nodes.dtype={proposal}."
        )

    def table(self) -> str:
        """Return a Markdown table with one row per wire format."""
        lines = [
            "| between nodes | step s | exposed s | rounding s | MB sent by a node | of the uncompressed step |",
            "|---|---|---|---|---|---|",
        ]
        for step in (self.plain, *self.steps):
            lines.append(
                f"| {step.name or 'as in the buckets'} | {step.step_s:.5g} | {step.exposed_s:.3g} | {step.codec_s:.3g} "
                f"| {step.node_bytes / 1e6:.4g} | {step.step_s / self.plain.step_s:.1%} |"
            )
        return "\n".join(lines)

    def numbers(self) -> dict[str, object]:
        """Return the comparison as a dictionary that can be written as JSON."""
        steps = [asdict(step) for step in (self.plain, *self.steps)]
        return {"steps": steps, "proposal": self.proposal, "codec_is_measured": self.is_measured}
