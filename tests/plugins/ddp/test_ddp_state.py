"""What rank 0 broadcasts: buffers."""

import pytest
import torch
from torch import nn

from drivetrain_ddp.options import DdpConfig
from started_ddp import start


@pytest.mark.parametrize("policy", ["broadcast", "none"])
@pytest.mark.ranks(2)
def test_buffers_follow_rank_zero_after_a_backward(policy: str):
    model = nn.Sequential(nn.Embedding(20, 8), nn.BatchNorm1d(8))
    model.register_buffer("cache", torch.ones(3), persistent=False)
    strategy = start(model, DdpConfig(buffers=policy))
    world, traffic = strategy.run.world, strategy.run.traffic
    with torch.no_grad():
        model[1].running_mean.fill_(float(world.rank))
        model.cache.fill_(float(world.rank))
    traffic.clear()
    with torch.no_grad():
        model(torch.arange(4))  # no gradients are wanted: nothing is sent
    model.eval()(torch.arange(4))
    with strategy.accumulating():
        model.train()(torch.arange(4))
        loss, other = ((model(torch.arange(4)) * model.cache[:1]).sum() for _ in range(2))
    assert not traffic.entries()
    strategy.backward(loss)
    expected = 0.0 if policy == "broadcast" else float(world.rank)
    assert model.cache[0].item() == expected
    sent = sum(buffer.nbytes for buffer in model.buffers())
    after = {("dp", "broadcast"): sent} if policy == "broadcast" and world.rank == 0 else {}
    found = traffic.sent()
    assert {key: found[key] for key in found if key[1] == "broadcast"} == after
    strategy.backward(other)  # its graph has saved a buffer
    strategy.close()
