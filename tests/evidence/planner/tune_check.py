"""What `recipes/tune.py` says of an emulated cluster, against how that was built and what `recipes/bench.py` measured.

python -m tests.evidence.planner.tune_check TUNE BENCH OUT   # two records; where to write

The sums and steps of BENCH were measured in another run than those that the description was fitted to. Of a step, the
links are TUNE's; what Lightning's loop and the passes over memory take is that of the fit to another record, which
`recipes/records/simulate/2026-11-21_check_emulated` holds.
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
from recipes.benchmarks.report import environment
from tests.evidence.planner.emulated import WIRE_SHARE, Checked, Machine, Setting, cases_of, markdown, ranked, summary

RECORDS = Path(__file__).resolve().parents[3] / "recipes" / "records"
LOOP = RECORDS / "simulate" / "2026-11-21_check_emulated" / "rows.jsonl"


@dataclass(frozen=True, kw_only=True)
class Described(Machine):
    """A machine whose cluster was measured; what a step costs beside communication is inherited."""

    described: Cluster

    def cluster(self, setting: Setting) -> Cluster:
        """As described, whatever the setting."""
        return self.described


def cluster_from(told: dict[str, Any]) -> Cluster:
    """From the JSON of a summary; over Gloo."""
    links = {name: Link(**told[name]) for name in ("inside", "across")}
    return Cluster(**{**told, **links, "transport": Gloo(**told["transport"])})


def truth_rows(setting: Setting, summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Rate and latency between nodes: built, measured, interval, measured over built."""
    cluster, fit = summary["cluster"], summary["calibration"]["links"]["across"]
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
    told = json.loads((asked.tune / "summary.json").read_text())
    loop = json.loads(LOOP.read_text())["machine"]
    machine = Described(
        described=cluster_from(told["cluster"]),
        **{field.name: loop[field.name] for field in fields(Machine)},
    )
    cases = cases_of(asked.bench)
    found = [Checked(case=case, predicted_s=case.predicted_s(machine)) for case in cases]
    setting = cases[0].setting
    rows = truth_rows(setting, told)
    pairs = ranked(found)
    wrong = [f"{a.case.arm} before {b.case.arm}: {a.group[1:]}" for a, b in pairs if a.predicted_s > b.predicted_s]
    text = [
        f"{setting}: what was built, and what `recipes/tune.py` measured in {told['took_s']:.0f} s",
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
        "error": summary(found),
        "pairs": len(pairs),
        "wrong_order": wrong,
        "environment": environment(),
    }
    (asked.out / "check.json").write_text(json.dumps(values, indent=1) + "\n")
    print("\n".join(text), json.dumps(values["error"], indent=1), sep="\n")


if __name__ == "__main__":
    main()
