"""What every command shares: start, checks of the configuration and of the machine, output."""
