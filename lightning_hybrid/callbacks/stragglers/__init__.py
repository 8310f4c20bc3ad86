"""Search for ranks and links that hold the others up: measurement, gathering, decision and output."""
