"""Construction of a fit's extensions from the options of its strategy."""

from __future__ import annotations

from typing import Any

from lightning_hybrid.strategy.extension import Extensions, FitContext, FitExtension


def made_for(strategy: Any) -> Extensions | None:
    """Make the extensions that a strategy's options ask for, the user's last, or None if there are none.

    Raises:
        ValueError: a constructor refuses the fit, or a factory makes something else.
    """
    comm = strategy._comm
    made = list[FitExtension | None]()
    fit = FitContext(
        module=strategy.lightning_module,
        precision=strategy.precision_plugin,
        topology=getattr(strategy, "replicas", comm.topology),  # of a stage, in a pipeline
        device=strategy.root_device,
        timeout=strategy._timeout,
        ddp_options=strategy._ddp_kwargs,
        failures=strategy._failures,
    )
    options = strategy._options
    # Imported here: a fit without an option needs none of its modules.
    if any(getattr(one, "node_slices", ()) for one in fit.module.modules()):
        from lightning_hybrid.strategy.node_slices.extension import node_slices_for

        made.append(node_slices_for(fit, options.features()))
    if options.has_error_feedback:
        from lightning_hybrid.strategy.feedback_state import ErrorFeedbackExtension

        made.append(ErrorFeedbackExtension(fit, saves=strategy.saves_residuals))
    if options.local_steps is not None:
        from lightning_hybrid.strategy.local_steps.extension import local_steps_for

        made.append(local_steps_for(fit, options.local_steps))
    if options.shard_update != "off":
        from lightning_hybrid.strategy.shard_update.extension import shard_update_for

        made.append(shard_update_for(fit, options.shard_update))
    for factory in options.extensions:
        made.append(one := factory(fit))
        if not isinstance(one, FitExtension):
            raise ValueError(
                f"`extensions` (={factory!r}) must be factories that take a `FitContext` and return a `FitExtension`, "
                f"and this one returned {type(one).__name__}. Derive its class from `FitExtension`."
            )
    some = [one for one in made if one is not None]
    return Extensions(fit, some) if some else None
