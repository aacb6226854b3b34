"""Profiles of a run: traces of all ranks in one, the largest costs, and the work of modules."""
