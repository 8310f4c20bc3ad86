"""Comparison of a cluster that `recipes/tune.py` described with its construction and `recipes/bench.py`'s times.

python -m tests.evidence.planner.tune_check TUNE BENCH OUT   # two records; where to write

The sums and steps of BENCH were measured in another run than those that the description was fitted to. Of a step, the
links are TUNE's; what Lightning's loop and the passes over memory take is that of the fit to another record, which
`recipes/records/simulate/2026-11-23_check_emulated` holds.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lightning_hybrid.planning.cluster import Cluster
from lightning_hybrid.planning.cost import Link
from lightning_hybrid.planning.cost_gloo import Gloo
from lightning_hybrid.planning.node_wire import CodecRates
from recipes.cli.results import environment, write_json
from tests.evidence.planner.emulated import (
    WIRE_SHARE,
    Checked,
    Machine,
    Setting,
    cases_of,
    error_summary,
    markdown,
    ranked,
)

RECORDS = Path(__file__).resolve().parents[3] / "recipes" / "records"
LOOP = RECORDS / "simulate" / "2026-11-23_check_emulated" / "rows.jsonl"


@dataclass(frozen=True, kw_only=True)
class Described(Machine):
    """Machine whose cluster was measured; what a step costs without communication is inherited."""

    described: Cluster

    def cluster(self, setting: Setting) -> Cluster:
        """Return the described cluster, whatever the setting."""
        return self.described


def cluster_from(content: dict[str, Any]) -> Cluster:
    """Make the cluster of a summary; over Gloo."""
    links = {name: Link(**content[name]) for name in ("inside", "across")}
    parts = links | {"transport": Gloo(**content["transport"]), "codec": CodecRates(**content.get("codec", {}))}
    return Cluster(**{**content, **parts})


def truth_rows(setting: Setting, error_summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Return rate and latency between nodes: built, measured, interval, measured over built."""
    cluster, fit = error_summary["cluster"], error_summary["calibration"]["links"]["across"]
    rate = setting.bytes_per_s * WIRE_SHARE
    found = [("payload of a link, MB/s", rate / 1e6, cluster["across"]["bytes_per_s"] / 1e6)]
    found.append(("one way, us", setting.delay_s * 1e6, cluster["across"]["latency_s"] * 1e6))
    found.append(("one way with software, us", setting.delay_s * 1e6, fit["latency_s"] * 1e6))
    return [{"what": what, "built": built, "measured": got, "ratio": got / built} for what, built, got in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("tune", "bench", "out"):
        parser.add_argument(name, type=Path)
    asked = parser.parse_args()
    content = json.loads((asked.tune / "summary.json").read_text())
    loop = json.loads(LOOP.read_text())["machine"]
    machine = Described(
        described=cluster_from(content["cluster"]), **{field.name: loop[field.name] for field in fields(Machine)}
    )
    cases = cases_of(asked.bench)
    found = [Checked(case=case, predicted_s=case.predicted_s(machine)) for case in cases]
    setting = cases[0].setting
    rows = truth_rows(setting, content)
    pairs = ranked(found)
    wrong = [f"{a.case.arm} before {b.case.arm}: {a.group[1:]}" for a, b in pairs if a.predicted_s > b.predicted_s]
    text = [
        f"{setting}: what was built, and what `recipes/tune.py` measured in {content['took_s']:.0f} s",
        "",
        "| what | built | measured | ratio |",
        "|---|---|---|---|",
        *(f"| {r['what']} | {r['built']:.5g} | {r['measured']:.5g} | {r['ratio']:.3f} |" for r in rows),
        "",
        f"of {len(pairs)} pairs of arms that differ by 10 %, in the wrong order: {wrong or 'none'}",
        "",
        markdown(found),
    ]
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "check.md").write_text("\n".join(text) + "\n")
    values = {
        "setting": str(setting),
        "truth": rows,
        "error": error_summary(found),
        "pairs": len(pairs),
        "wrong_order": wrong,
        "environment": environment(),
    }
    write_json(asked.out / "check.json", values)
    print("\n".join(text), json.dumps(values["error"], indent=1), sep="\n")


if __name__ == "__main__":
    main()
