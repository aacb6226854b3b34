"""Messages of a pipeline where tags do not tell streams apart, as over NCCL."""

from datetime import timedelta

import pytest
import torch

from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.world import World
from drivetrain.traffic import Traffic
from drivetrain_megatron.pipeline.transfer import (
    Direction,
    Link,
    Message,
    StageLinks,
    streams,
)
from drivetrain_megatron.recording.phases import TensorMeta

STAGES = 2
META = (TensorMeta((2,), torch.float32),)


class Tagless:
    """A process group that knows no tags."""

    def __init__(self, group):
        self._group = group

    def send(self, tensors, rank, tag):
        return self._group.send(tensors, rank, 0)

    def recv(self, tensors, rank, tag):
        return self._group.recv(tensors, rank, 0)


@pytest.mark.ranks(2)
def test_streams_do_not_wait_for_each_other():
    world = World.discover(cpu=True)
    mesh = Mesh.build({"pp": 2}, world)
    groups = [Tagless(group) for group in mesh.start_again("pp", streams(STAGES), world)]
    device, timeout = torch.device("cpu"), timedelta(seconds=20)
    link = Link(StageLinks(mesh["pp"]), Traffic(), device, timeout, STAGES, groups)
    inputs, tied = Message.input_of(1, 0), Message(Direction.TIED, 0, 1, 0)
    if world.rank == 0:
        link.send(inputs, [torch.ones(2)])
        link.send(tied, [torch.full((2,), 3.0)])
    else:
        late, early = link.receive(tied, META), link.receive(inputs, META)
        assert late.wait()[0].tolist() == [3.0, 3.0]
        assert early.wait()[0].tolist() == [1.0, 1.0]
    link.flush()
