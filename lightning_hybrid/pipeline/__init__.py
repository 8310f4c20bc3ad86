"""Pipeline-parallel training, in which the stages of a network run on different ranks.

    rank = data_rank * num_stages + stage        the ranks of a pipeline are consecutive

    options.py            validation of the user's options, and the network's blocks
    cuts.py               cuts of the network into stages of equal time
    rank_layout.py        stages of each rank, process groups, parameters that other ranks hold
    cut_model.py          the network while each rank holds only its own stages
    data_ranks.py         samplers and reductions: the ranks of a pipeline count as one
    shapes.py             shape and dtype of the tensors between stages, from fake tensors
    local_stages.py       the stages of a rank, comparison with other ranks, forward through all stages
    checked_stage.py      torch's `PipelineStage` with fp32 gradient sums and shape checks
    microbatches.py       the user's `training_step` around a stage: its input, loss and logs
    loss_check.py         comparison of the first micro-batch's loss in stages with that of the whole network
    training_step.py      one step, over all micro-batches
    user_clipping.py      gradient clipping by the module's own hook
    whole_state.py        checkpoints and weights of the complete network
    pipeline_watchdog.py  rank, stage and micro-batch at which a run stopped
    strategy.py           the Lightning strategy

The schedules come from `torch.distributed.pipelining`. Sources: GPipe (Huang et al. 2018,
arXiv:1811.06965), PipeDream's 1F1B (Narayanan et al. 2019, with a flush as in arXiv:2006.09503) and
its interleaved form (arXiv:2104.04473).
"""
