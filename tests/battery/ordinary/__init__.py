"""A battery of ordinary use: what trains under Lightning's `ddp` trains the same under `hybrid_allreduce`.

Rows are classes in `models`, `layers`, `state`, `optimizers`, `loops`, `loaders` and `callbacks`; to add one is to
write the class, or a line of the table in `optimizers`. `case` says how a row is run and by what it is judged, and
`python -m tests.battery.ordinary NAME` shows it beside Lightning's mixed precision.
"""
