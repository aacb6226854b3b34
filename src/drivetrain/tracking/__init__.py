"""Experiment trackers: one small contract, and adapters that are found by entry point."""

from drivetrain.tracking.tracker import Tracker
from drivetrain.tracking.trackers import Trackers

__all__ = ["Tracker", "Trackers"]
