"""Observation of a run: records of its steps, profiles, trackers, and its report."""
