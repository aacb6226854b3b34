"""Tracker classes that a script registers are found by name."""

import accelerate as real
import pytest

from drivetrain.compat import accelerate as ours
from drivetrain.compat.trackers import LOGGER_TYPE_TO_CLASS
from drivetrain.errors import UsageError


@pytest.fixture(autouse=True)
def _restored(monkeypatch):
    monkeypatch.delitem(LOGGER_TYPE_TO_CLASS, "notes", raising=False)


class Notes(ours.tracking.GeneralTracker):
    """Keeps what it is given."""

    name = "notes"

    tracker = None

    def __init__(self, run_name):
        self.tracker = [run_name]

    def store_init_configuration(self, values):
        self.tracker.append(values)

    def log(self, values, step=None):
        self.tracker.append((step, values))


def test_classes_have_the_names_of_accelerate_and_others_are_refused():
    for name in ("TensorBoardTracker", "WandBTracker", "TrackioTracker", "MLflowTracker"):
        found = getattr(ours.tracking, name)
        assert issubclass(found, ours.tracking.GeneralTracker)
        assert found.name == getattr(real.tracking, name).name

    with pytest.raises(UsageError, match="expected a subclass of GeneralTracker"):
        ours.tracking.register_tracker_class(dict)
    with pytest.raises(UsageError, match="with a name"):
        ours.tracking.register_tracker_class(ours.tracking.GeneralTracker)

    ours.tracking.register_tracker_class(Notes)
    accelerator = ours.Accelerator(cpu=True, log_with=["notes"])
    accelerator.init_trackers("project", {"rate": 1})
    accelerator.log({"loss": 2}, step=3)
    kept = accelerator.get_tracker("notes", unwrap=True)
    assert kept == ["project", {"rate": 1}, (3, {"loss": 2})]
    with pytest.warns(UserWarning, match="'notes' was registered before"):
        ours.tracking.register_tracker_class(Notes)
