"""Messages of a pipeline: streams without tags, as over NCCL; dtypes and errors of a link."""

from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from drivetrain.cost import Traffic
from drivetrain.errors import CollectiveError
from drivetrain.runtime.mesh import Axis, Mesh
from drivetrain.runtime.world import World, reached
from drivetrain_megatron.pipeline.runner import LocalStages, _sending
from drivetrain_megatron.pipeline.schedules import Action, ActionKind
from drivetrain_megatron.pipeline.transfer import Direction, Link, Message, StageLinks, streams
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


@pytest.mark.ranks(2)
def test_what_an_end_has_begun_is_known_when_it_is_closed():
    """A stage that waits for the last message would else hear that nobody will send it."""
    mesh = Mesh.build({"pp": 2}, World.discover(cpu=True))
    link = Link(
        StageLinks(mesh["pp"]), Traffic(), torch.device("cpu"), timedelta(seconds=20), STAGES
    )
    for _ in range(7):
        link.begin()
    link.close()
    assert 7 in reached().values()


def test_wide_numbers_are_rounded_between_hosts_and_errors_name_the_other_host():
    axis = Axis(name="pp", size=3, rank=0, ranks=(0, 1, 2), hosts=("a", "a", "b"))
    links = StageLinks(axis, rounds=True)
    for dtype in (torch.float16, torch.bfloat16, torch.int64):
        assert links.wire_dtype(1, 2, dtype) is dtype
    assert links.wire_dtype(1, 2, torch.float32) is torch.bfloat16
    assert links.wire_dtype(0, 1, torch.float32) is torch.float32

    def wait(timeout):
        raise RuntimeError("closed")

    link = Link(links, Traffic(), torch.device("cpu"), timedelta(seconds=1), 3)
    for there, back in ((0, 2), (2, 0)):
        with pytest.raises(CollectiveError, match="look at what rank 2 on host b printed last"):
            link.finish(SimpleNamespace(wait=wait), Message(Direction.TIED, there, back, 0))


def test_two_pipelines_on_one_axis_have_tags_of_their_own():
    axis = Axis(name="pp", size=3, rank=0, ranks=(0, 1, 2), hosts=("a", "a", "a"))
    here = (StageLinks(axis), Traffic(), torch.device("cpu"), timedelta(seconds=1))
    messages = [Message(each, 0, stage, 0) for each in Direction for stage in range(3)]
    tags = [link._tag(each) for link in (Link(*here, 3), Link(*here, 3)) for each in messages]
    assert len(set(tags)) == 2 * streams(3)


def test_gradients_of_inputs_leave_once_within_backward():
    leaf, sent = torch.ones(2, requires_grad=True), []
    with _sending([leaf], sent.append):
        leaf.sum().backward()
        assert [gradient.tolist() for gradient in sent[0]] == [[1.0, 1.0]]
    assert len(sent) == 1


def test_a_receive_is_posted_while_the_action_before_runs():
    stages, done = object.__new__(LocalStages), []
    stages.telling, stages.dropout = nullcontext, SimpleNamespace(several=nullcontext)
    stages._expect = lambda action, workers: done.append(f"expect {action.micro_batch}")
    stages._do = lambda action, worker: done.append(f"run {action.micro_batch}")
    stages._run([Action(ActionKind.FORWARD, 1, number) for number in range(3)], {1: None})
    assert done.index("expect 1") < done.index("run 0")
    assert done.index("run 0") < done.index("expect 2") < done.index("run 1")
