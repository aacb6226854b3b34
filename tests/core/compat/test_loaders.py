"""Accelerate's functions and classes of loaders, and samplers that are the real package's."""

import pytest
import torch
from accelerate import data_loader as real
from torch.utils.data import DataLoader

from drivetrain import UsageError
from drivetrain.compat import accelerate as ours

ROWS = list(range(22))


def batches(**options):
    loader = DataLoader(ROWS, batch_size=4)
    return [batch.tolist() for batch in ours.data_loader.prepare_data_loader(loader, **options)]


def test_parts_are_those_of_accelerate():
    for even in (False, True):
        for split in (False, True):
            for index in range(2):
                options = {"split_batches": split, "even_batches": even}
                theirs = real.prepare_data_loader(
                    DataLoader(ROWS, batch_size=4), None, 2, index, **options
                )
                found = batches(num_processes=2, process_index=index, **options)
                assert found == [batch.tolist() for batch in theirs]

    with pytest.raises(UsageError, match=r"expected num_processes=1 .* found 2 and 1"):
        batches(num_processes=2, process_index=1, dispatch_batches=True)
    with pytest.raises(UsageError, match="slice_fn_for_dispatch"):
        batches(slice_fn_for_dispatch=torch.chunk)

    for name in ("DataLoaderDispatcher", "DataLoaderShard"):
        with pytest.raises(UsageError, match=f"found a call of {name}; pass the DataLoader to"):
            getattr(ours.data_loader, name)(ROWS, batch_size=4)

    for state in (ours.state.AcceleratorState, ours.state.PartialState, ours.state.GradientState):
        state._reset_state()
    accelerator = ours.Accelerator(cpu=True)
    accelerator.state._reset_state()
    assert accelerator.num_processes == 1


@pytest.mark.ranks(2)
def test_dispatched_loaders_are_dispatchers():
    dispatcher = ours.data_loader.DataLoaderDispatcher
    for dispatched in (True, False):
        config = ours.DataLoaderConfiguration(dispatch_batches=dispatched)
        accelerator = ours.Accelerator(cpu=True, dataloader_config=config)
        loader = accelerator.prepare(DataLoader(ROWS, batch_size=4))
        assert isinstance(loader, dispatcher) is dispatched
        assert isinstance(loader, ours.data_loader.DataLoaderShard) is not dispatched
