"""How long a step of a pipeline takes over its formula, with stages that sleep, and how many micro-batches it keeps."""
