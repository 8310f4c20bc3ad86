"""Parts that all commands share: start, checks of the configuration and of the machine, output."""
