"""Agrees on who takes part in an elastic run: who is lost, who joins, and which step all have after each change."""
