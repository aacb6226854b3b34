"""Hosts and ranks of a run: found, placed, started, watched, ended; who failed, and who waits."""
