"""Hours, energy and price of a run, from the seconds of a step."""

from __future__ import annotations


def run_totals(
    *,
    step_s: float,
    num_steps: float,
    num_nodes: int,
    watts_per_node: float | None = None,
    price_per_node_hour: float | None = None,
) -> dict[str, float]:
    """Return `run_hours`, and where a node's rate is known `run_kwh` and `run_price`.

        run_hours = num_steps * step_s / 3600
        run_kwh   = run_hours * num_nodes * watts_per_node / 1000
        run_price = run_hours * num_nodes * price_per_node_hour         in the unit of the rate

    >>> run_totals(step_s=0.5, num_steps=7200, num_nodes=4, price_per_node_hour=10.0)
    {'run_hours': 1.0, 'run_price': 40.0}
    """
    hours = num_steps * step_s / 3600
    totals = {"run_hours": hours}
    if watts_per_node is not None:
        totals["run_kwh"] = hours * num_nodes * watts_per_node / 1000
    if price_per_node_hour is not None:
        totals["run_price"] = hours * num_nodes * price_per_node_hour
    return totals
