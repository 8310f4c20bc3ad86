"""Extension for `uneven_batches="join"`: ranks whose training loaders end early join the rest of the epoch.

One training batch:

    fetch           batch or end, on each rank -> all know all numbers of samples        agreement.py
                    a rank without a batch gets an earlier one, which counts nothing     joined_loader.py
    training_step   statistics, logged sums and metrics of a repeated batch are undone   repeated_batch.py
    backward        loss -> loss * samples of this rank / unit                           window_weights.py
                    a repeated batch brings gradients that are exactly zero              repeated_batch.py
    hook            sum over ranks / (samples of all ranks / unit)                       comm/hook.py
"""
