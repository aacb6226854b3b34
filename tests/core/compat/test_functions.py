"""Functions and classes of loaders, of notebooks and of trackers, as scripts call them."""

import itertools

import accelerate as real
import pytest
import torch
from torch.multiprocessing import ProcessRaisedException
from torch.utils.data import DataLoader

from drivetrain.compat import accelerate as ours
from drivetrain.compat.names import LOGGER_TYPE_TO_CLASS
from drivetrain.errors import UsageError
from drivetrain.runtime.world import World

ROWS = list(range(22))


def batches(**options):
    loader = DataLoader(ROWS, batch_size=4)
    return [batch.tolist() for batch in ours.data_loader.prepare_data_loader(loader, **options)]


def test_parts_are_those_of_accelerate():
    for even, split, index in itertools.product((False, True), (False, True), range(2)):
        options = {"split_batches": split, "even_batches": even}
        loader = DataLoader(ROWS, batch_size=4)
        theirs = real.data_loader.prepare_data_loader(loader, None, 2, index, **options)
        found = batches(num_processes=2, process_index=index, **options)
        assert found == [batch.tolist() for batch in theirs]

    with pytest.raises(UsageError, match=r"expected num_processes=1 .* found 2 and 1"):
        batches(num_processes=2, process_index=1, dispatch_batches=True)
    with pytest.raises(UsageError, match="slice_fn_for_dispatch"):
        batches(slice_fn_for_dispatch=torch.chunk)

    theirs = DataLoader(torch.arange(4), batch_size=4)
    for put in (False, True):
        options = {"device": torch.device("meta"), "put_on_device": put}
        (batch,) = ours.data_loader.prepare_data_loader(theirs, **options)
        assert batch.is_meta is put

    for name in ("DataLoaderDispatcher", "DataLoaderShard"):
        with pytest.raises(UsageError, match=f"found a call of {name}; pass the DataLoader to"):
            getattr(ours.data_loader, name)(ROWS, batch_size=4)

    for state in (ours.state.AcceleratorState, ours.state.PartialState, ours.state.GradientState):
        state._reset_state()
    accelerator = ours.Accelerator(cpu=True)
    accelerator.state._reset_state()
    assert accelerator.num_processes == 1
    assert accelerator.config.run.step_scheduler_with == "samples"
    own = ours.Accelerator(cpu=True, config={"step_scheduler_with": "optimizer"})
    assert own.config.run.step_scheduler_with == "optimizer"


@pytest.mark.ranks(2)
def test_dispatched_loaders_are_dispatchers():
    dispatcher = ours.data_loader.DataLoaderDispatcher
    for dispatched in (True, False):
        config = ours.DataLoaderConfiguration(dispatch_batches=dispatched)
        accelerator = ours.Accelerator(cpu=True, dataloader_config=config)
        loader = accelerator.prepare(DataLoader(ROWS, batch_size=4))
        assert isinstance(loader, dispatcher) is dispatched
        assert isinstance(loader, ours.data_loader.DataLoaderShard) is not dispatched


# --- ``notebook_launcher`` as scripts for Accelerate call it ---


def test_accelerates_arguments_choose_precision_and_processes(tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text("strategy: zero1")
    monkeypatch.setenv("DRIVETRAIN_CONFIG", str(tmp_path / "run.yaml"))

    def train(folder):
        accelerator = ours.Accelerator(cpu=True)
        text = f"{accelerator.mixed_precision} {accelerator.config.strategy}"
        (folder / str(accelerator.process_index)).write_text(text)

    ours.notebook_launcher(train, (tmp_path,), 2, "bf16", use_port="29511")
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == ["bf16 zero1"] * 2


def test_processes_start_again_after_a_failure_so_many_times(tmp_path):
    def train(folder):
        starts = len(list(folder.iterdir()))
        (folder / str(starts)).touch()
        assert starts == 2, f"start {starts}"

    with pytest.raises(ProcessRaisedException, match="start 1"):
        ours.notebook_launcher(train, (tmp_path,), 1, max_restarts=1)
    ours.notebook_launcher(train, (tmp_path,), 1, max_restarts=1)
    assert len(list(tmp_path.iterdir())) == 3


def test_no_precision_leaves_it_to_the_launch_configuration(monkeypatch):
    given = []
    start = "drivetrain.processes.notebook_launcher"
    monkeypatch.setattr(start, lambda *args, **options: given.append((args, options)))
    ours.notebook_launcher(print, (1,), 2)
    assert given == [((print, (1,), 2), {"mixed_precision": None})]
    with pytest.raises(UsageError, match="num_nodes=2; .* 'drivetrain launch'"):
        ours.notebook_launcher(print, num_nodes=2)


# --- tracker classes that a script registers are found by name ---


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


def test_classes_have_the_names_of_accelerate_and_others_are_refused(monkeypatch):
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

    tracker = type("Mine", (), {"log": ours.tracking.on_main_process(lambda self: 1)})()
    monkeypatch.setattr("drivetrain.compat.names.World.discover", lambda: World(rank=1, size=2))
    assert tracker.log() == 1
    tracker.main_process_only = True
    assert tracker.log() is None


@pytest.mark.parametrize("given", [True, False])
def test_copies_to_the_device_wait_or_not(monkeypatch, given):
    seen = []

    def sent(batch, device, *, non_blocking=False, **options):
        seen.append(non_blocking)
        return batch

    monkeypatch.setattr("drivetrain.data.loader.send_to_device", sent)
    batches(put_on_device=True, non_blocking=given)
    assert set(seen) == {given}
