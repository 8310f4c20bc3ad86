"""Extension for `uneven_batches="join"`: ranks that run out of batches continue until the epoch ends.

One training batch:

    fetch           batch or end, on each rank -> every rank knows all numbers of samples    agreement.py
                    a rank without a batch repeats an earlier one, with weight zero          joined_loader.py
    training_step   a repeated batch leaves statistics, logged sums and metrics unchanged    repeated_batch.py
    backward        loss -> loss * samples of this rank / unit                               window_weights.py
                    a repeated batch contributes gradients that are exactly zero             repeated_batch.py
    hook            sum over ranks / (samples of all ranks / unit)                           comm/hook.py
"""
