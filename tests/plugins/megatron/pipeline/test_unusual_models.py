"""Unusual models in a pipeline: compiled, with parameters as arguments, or refused by trials."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from divided_steps import check_two_steps
from drivetrain.errors import CollectiveError, UsageError
from drivetrain.testing.conformance.suite import everyone
from stacks import Doubled, Parts, Stack
from staged_twins import Twins

pytestmark = [pytest.mark.ranks(2), pytest.mark.filterwarnings("ignore:The .grad attribute")]

WORDS, WIDTH = 11, 8
IDS = torch.arange(20).view(4, 5) % WORDS


class Block(nn.Module):
    """Adds a layer's output; a table of positions may come with each call."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, table=None):
        return x + self.up(x if table is None else x + table[: x.shape[1]]).tanh()


class Words(Stack):
    """Blocks between an embedding and a head, with the loss."""

    block = Block

    def __init__(self):
        first, last = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        super().__init__((self.block() for _ in range(3)), first=first, last=last)
        self.double()

    def forward(self, ids, *args):
        return {"loss": mean(super().forward(ids, *args), ids)}


class Tabled(Words):
    """Gives a parameter, and no result of a layer, to every block."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(WIDTH, WIDTH).double())

    def forward(self, ids):
        return super().forward(ids, self.table)


def compiled_in_place():
    model = Words()
    for block in model.blocks:
        block.compile(backend="eager")
    return model


def compiled_around():
    """Blocks in wrappers, and a part outside of blocks that meets tensors of other stages."""
    model = Words()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="eager")
    model.last.compile(backend="eager")
    return model


class Routed(Block):
    """Depends on values, and returns a bias that has another shape than each of its arguments."""

    def forward(self, x, memory=None, bias=None):
        rows = (x[..., 0] > 0).nonzero()
        x = x.index_put(tuple(rows.T), self.up(x[tuple(rows.T)]).tanh())
        bias = x @ memory.transpose(1, 2) if bias is None else bias
        return x + bias @ memory, bias


class Crossing(Words):
    """Reads a second sequence, which in the example has the length of the first."""

    block = Routed

    def forward(self, ids, others):
        x, memory, bias = self.first(ids), F.one_hot(others % WIDTH, WIDTH).double(), None
        for block in self.blocks:
            x, bias = block(x, memory, bias)
        return {"loss": mean(self.last(x), ids)}


def test_shapes_of_blocks_that_depend_on_values():
    model = Crossing()
    model.example_inputs = {"ids": IDS, "others": IDS}
    batch = {"ids": IDS, "others": IDS[:, :3]}
    check_two_steps(model, batch, {"pp": 2}, tolerance=1e-10)


@pytest.mark.parametrize("make", [Tabled, compiled_in_place, compiled_around])
def test_equal_to_one_process(make):
    model = make()
    model.example_inputs = {"ids": IDS}
    check_two_steps(model, {"ids": IDS}, {"pp": 2}, tolerance=1e-10)


def test_compiled_blocks_stay_compiled():
    """Their code is compiled code, also behind the pipeline, and a closed one gives it back."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model, before = Words(), []
    for block in model.blocks:
        block.compile(backend=backend)
        before.append(block._compiled_call_impl)
    both = Twins(model, {"ids": IDS})
    both.accelerator.backward(both.model(IDS)["loss"])
    assert graphs
    mine = [b for b in both.model.blocks if b._compiled_call_impl is not None]
    both.close()
    assert mine
    assert all(block._compiled_call_impl in before for block in mine)


class Clamped(Block):
    """Bounds its own weight, through a view, before each use."""

    def forward(self, x, table=None):
        self.up.weight.data[:2].clamp_(-0.1, 0.1)
        return super().forward(x, table)


class ClampedWords(Words):
    block = Clamped


def test_a_forward_that_writes_into_a_parameter_is_refused_by_name():
    model = ClampedWords()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UsageError, match=r"clamp_\(\) writes into 'blocks\.0\.up\.weight'"):
        Twins(model, {"ids": IDS})
    torch.testing.assert_close(model.state_dict(), before)


class Logits(Words):
    forward = Stack.forward


def mean(output, ids):
    return F.cross_entropy(output.flatten(0, 1), ids.flatten())


def total(output, ids):
    return F.cross_entropy(output.flatten(0, 1), ids.flatten(), reduction="sum")


def test_a_function_of_the_script_in_a_loss():
    both = Twins(Logits(), {"x": IDS})
    both.backward(*(Doubled.apply(mean(each, IDS)) / 2 for each in both(IDS)))
    both.check_gradients()


def test_ranks_with_other_loss_functions_are_told_so():
    """Also in a later call, when each rank has decided about the function that it knows."""
    both = Twins(Logits(), {"x": IDS})
    accelerator, model = both.accelerator, both.model
    for _ in range(2):
        accelerator.pipeline_step(model, IDS, IDS, loss_fn=mean)
    with pytest.raises(UsageError, match="same loss function on every rank"):
        accelerator.pipeline_step(
            model, IDS, IDS, loss_fn=total if accelerator.mesh["pp"].rank else mean
        )
    assert accelerator.pipeline_step(model, IDS, IDS, loss_fn=total).item() > 0


class Tied(Words):
    """Uses the words' embedding as the head, too."""

    def __init__(self):
        super().__init__()
        self.last.weight = self.first.weight


@pytest.mark.parametrize("write", ["data", "value"])
def test_values_that_a_script_changes_reach_the_copies(write):
    """Swapped for an evaluation and back, as averages of weights are; else it is an error."""
    both = Twins(Tied(), {"ids": IDS})
    accelerator, model = both.accelerator, both.model

    def scale(module, factor):
        with torch.no_grad():
            for parameter in module.parameters():
                (parameter.data if write == "data" else parameter).mul_(factor)

    def check_evaluation():
        with torch.no_grad():
            found, expected = both(IDS)
        torch.testing.assert_close(found["loss"], expected["loss"])

    for factor in (0.5, 2.0):
        both(IDS)
        for module in (model, both.twin):
            scale(module, factor)
        check_evaluation()
        for module in (model, both.twin):
            scale(module, 1.5)
        both.backward(*(each["loss"] for each in both(IDS)))
    check_evaluation()
    with accelerator.gathered(model.parameters()):
        scale(model, 0.5)
    scale(both.twin, 0.5)
    check_evaluation()
    scale(model, 0.5)
    is_owner = accelerator.mesh["pp"].rank == 0
    with pytest.raises(UsageError if is_owner else CollectiveError) as caught, torch.no_grad():
        model(IDS)
    copies = "'first.weight', of which other pipeline stages have copies"
    assert not is_owner or copies in str(caught.value)


class Masked(Stack):
    """Its rows are masked before and behind blocks that add noise; the difference is zero."""

    def __init__(self):
        super().__init__(
            Parts(lambda m, x: x + 0.0 * m.layer(x) * torch.rand(()), layer=nn.Linear(2, 2))
            for _ in range(3)
        )
        self.example_inputs = torch.ones(4, 2)

    def forward(self, x):
        mask = torch.rand(len(x), 1)
        return super().forward(x * mask) - x * mask


def test_stages_draw_the_same_numbers():
    both = Twins(Masked(), cut="1,2")
    for _ in range(3):
        loss = F.dropout(both.model(torch.ones(4, 2))).square().sum()
        both.accelerator.backward(loss)
        with torch.no_grad():
            assert not loss.item()
            assert not both.model(torch.ones(4, 2)).any()
        assert len(set(everyone(torch.rand(()).item()))) == 1  # of the script, as for its batches
