"""A process group that a script, or Ray Train, has made is adopted: used, and left as it was."""

import pytest
import torch
import torch.distributed as dist

from drivetrain import Accelerator


@pytest.mark.ranks(2)
def test_a_group_that_was_there_is_left_as_it_was():
    before, rank = dist.group.WORLD, dist.get_rank()
    accelerator = Accelerator(cpu=True)
    assert (accelerator.process_index, accelerator.num_processes) == (rank, 2)
    assert dist.group.WORLD is before
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.constant_(model.weight, 1.0)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.backward(model(torch.full((1, 4), float(rank))).sum())
    optimizer.step()
    assert model.weight.tolist() == [[0.5] * 4]  # the mean of the gradients 0 and 1 was subtracted
    accelerator.end_training()
    assert dist.group.WORLD is before
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2.0


@pytest.mark.ranks(2)
def test_a_group_that_the_accelerator_has_made_ends_with_it(monkeypatch):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True) if dist.get_rank() == 0 else None
    port = [store.port if store else 0]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port[0])}
    for name, value in {**place, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == dist.get_world_size() == 2
    accelerator.end_training()
    assert not dist.is_initialized()
