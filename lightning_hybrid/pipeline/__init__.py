"""A pipeline of stages, each on ranks of its own, with micro-batches on their way through them.

    rank = data_rank * num_stages + stage        neighbours of a pipeline are neighbours on a node

    options.py            what a user gives: blocks, cuts, schedule; what is refused
    cuts.py               where the network is cut, so that stages are even
    rank_layout.py        which ranks hold which stage, their process groups, and what is on other ranks
    cut_model.py          the network while each rank holds its own stages
    data_ranks.py         what Lightning asks of ranks: those of a pipeline count as one
    shapes.py             shape and dtype of what goes from stage to stage, from fake tensors
    local_stages.py       the stages of a rank, agreement with others, and forward through all
    checked_stage.py      torch's stage, with fp32 sums and a check before each message
    microbatches.py       the user's `training_step` around a stage: its input, its loss, its log
    loss_check.py         the loss of the first micro-batch in stages and with the whole network, which must agree
    training_step.py      one step, over all micro-batches
    user_clipping.py      clipping by the module's own hook
    whole_state.py        one checkpoint, one module, of all stages
    pipeline_watchdog.py  the rank, stage and micro-batch at which a run came to a halt
    strategy.py           the wiring into Lightning

Schedules are those of `torch.distributed.pipelining`. Sources: GPipe (Huang et al. 2018, arXiv:1811.06965), PipeDream's
1F1B (Narayanan et al. 2019, with a flush as in arXiv:2006.09503) and its interleaved form (arXiv:2104.04473).
"""
