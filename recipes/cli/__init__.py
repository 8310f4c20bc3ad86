"""Modules that all commands share: start-up, validation of the configuration, and output."""
