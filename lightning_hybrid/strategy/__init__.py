"""Lightning strategy `hybrid_allreduce`, its extensions and its options.

A training step has these stages. `tests/test_one_step.py` checks them in the same order:

    1   batch             loader -> host batch                               LightningDataModule
    2   device prefetch   host batch -> device batch                         data/prefetch.py
    3a  open              fp32 parameters -> their half copies               precision/half_window.py
    3b  forward           fp16 images -> fp16 activations -> fp32 loss       the user's `training_step`
    4   scaled loss       loss -> loss * scale                               precision/plugin.py: pre_backward
    5   backward          loss -> fp16 gradients, in DDP's buckets           torch
    6   bucket            gradients -> flat buffers                          torch DDP, sized in configure_ddp
    7   hook              local bucket -> future of the averaged bucket      comm/hook.py: average_bucket
    8   hybrid all-reduce bucket -> sum over the world, in place             comm/engine/
    9a  unscale, close    fp16 gradients -> fp32; fp32 parameters again      precision/plugin.py: post_backward
    9b  LARS / LAMB       fp32 parameter, gradient -> fp32 parameter         optim/
    10  metrics           loss, scale, skipped steps, exposed communication  callbacks/
"""
