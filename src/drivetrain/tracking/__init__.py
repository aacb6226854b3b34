"""Experiment trackers: one small contract, and adapters that are found by entry point."""

from drivetrain.tracking.trackers import Tracker, Trackers

__all__ = ["Tracker", "Trackers"]
