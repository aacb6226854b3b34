"""What a rank owns under FSDP: rows as ``torch.chunk`` cuts them, of parameters of any kind.

The conformance suite trains uneven shapes; here what each rank owns is compared with
``torch.chunk``, blocks mix dtypes and trainable with frozen, and collectives are counted.
"""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.optim import AdamW

from drivetrain.testing.conformance.suite import Twins, adamw, everyone, weights
from drivetrain.testing.models import OUT, WIDTH, Case, linear
from stacks import Parts
from zero_stages import calls, start

OUTER = {"row": 1, "turned": 1, "kernel": 2}
"""The dim that is outermost in memory, where it is not the first; one row is cut along the next."""


def parameter(*shape, dtype=torch.float64):
    return nn.Parameter(torch.randn(*shape, dtype=dtype))


def shapes_of_a_block():
    """Return parameters of 7 rows, of fewer than there are ranks, of none, of other orders."""

    def compute(m, x):
        x = x @ m.seven.T * m.scale + m.row
        x = x + (x @ m.two.T).sum(1, keepdim=True) + (x @ m.empty.T).sum() + m.thin.sum()
        x = x + torch.tanh(x @ m.turned).sum(1, keepdim=True) + m.image.square().sum((1, 2, 3))
        return torch.tanh(x * m.kernel.cos().sum((1, 2)))

    image = torch.randn(7, 2, 3, 1, dtype=torch.float64)
    return Parts(
        compute,
        seven=parameter(7, WIDTH),
        two=parameter(2, WIDTH),
        row=parameter(1, WIDTH),
        scale=nn.Parameter(torch.tensor(0.7, dtype=torch.float64)),
        empty=parameter(0, WIDTH),
        thin=parameter(3, 0),
        turned=nn.Parameter(torch.randn(5, WIDTH, dtype=torch.float64).t()),
        image=nn.Parameter(image.to(memory_format=torch.channels_last)),
        kernel=nn.Parameter(torch.randn(5, WIDTH, 2, dtype=torch.float64).permute(1, 2, 0)),
    )


def shapes():
    return nn.Sequential(shapes_of_a_block(), shapes_of_a_block(), linear(WIDTH, OUT))


def blend():
    """Return a block of four dtypes; some of it is frozen."""

    def compute(m, x):
        x = x + m.coarse(m.norm(x.float()).bfloat16()).double()
        return torch.tanh(m.fixed(m.fine(x)) + 0.01 * (x @ m.codes.double().T).mean())

    codes = torch.randint(-9, 9, (3, WIDTH), dtype=torch.int8)
    return Parts(
        compute,
        norm=nn.LayerNorm(WIDTH, dtype=torch.float32),
        coarse=linear(WIDTH, WIDTH, dtype=torch.bfloat16),
        fine=linear(WIDTH, WIDTH),
        fixed=linear(WIDTH, WIDTH).requires_grad_(False),
        codes=nn.Parameter(codes, requires_grad=False),
    )


def blends():
    return nn.Sequential(blend(), blend(), blend(), linear(WIDTH, OUT).requires_grad_(False))


def rows_of(value, dim, size, rank):
    """Return what ``torch.chunk`` gives a rank; nothing where there are too few chunks."""
    if not value.dim():
        return value if rank == 0 else value.new_empty(0)
    chunks = torch.chunk(value, size, dim)
    return chunks[rank] if rank < len(chunks) else value.narrow(dim, 0, 0)


def check_rows(accelerator, twins):
    """What a rank owns is what ``torch.chunk`` gives it of the whole values."""
    strategy, axis = accelerator.strategy_of(twins.model), twins.axis
    whole = weights(accelerator, twins.model)
    slots = {slot.name: slot for slot in strategy.placement}
    assert set(slots) == set(whole)
    for name, slot in slots.items():
        value = whole[name]
        dim = OUTER.get(name.rpartition(".")[2], 0)
        expected = rows_of(value, dim, axis.size, axis.rank)
        assert slot.owned_numel == expected.numel(), name
        if expected.numel():
            piece = slot.piece(strategy.placement.flat_of(slot).shard.tensor)
            assert torch.equal(piece, expected), name
            assert piece.shape == expected.shape
        else:
            assert strategy.placement.fragment_of(slot) is None
    held = sum(everyone(sum(slot.owned_numel for slot in slots.values())))
    assert held == sum(value.numel() for value in whole.values()), "something is held twice"


def check_dtensors(accelerator, twins):
    """The same rows, as torch's own DTensors see them."""
    whole = weights(accelerator, twins.model)
    for name, shown in accelerator.dtensors(twins.model).items():
        assert shown.shape == whole[name].shape
        assert shown.stride() == whole[name].stride()
        assert torch.equal(shown.full_tensor(), whole[name]), name
        if (outer := OUTER.get(name.rpartition(".")[2])) is not None:
            assert shown.placements == (Shard(outer),), name


@pytest.mark.parametrize(
    "size", [pytest.param(n, marks=pytest.mark.ranks(n), id=f"ranks{n}") for n in (1, 3, 4)]
)
def test_rows_are_those_of_chunk(size):
    """Before and after training, which is that of one process."""
    accelerator = start({"name": "fsdp"})
    twins = Twins(accelerator, Case("shapes", shapes), adamw)
    check_rows(accelerator, twins)
    for step in range(3):
        twins.backward(step)
        twins.step()
    twins.check()
    check_rows(accelerator, twins)
    if size > 1:
        check_dtensors(accelerator, twins)
    for name, ours in twins.model.named_parameters():
        theirs = twins.twin.get_parameter(name)
        assert (ours.shape, ours.stride()) == (theirs.shape, theirs.stride())


def trained(model):
    """Return an optimizer of what is trained: int8 may not be stepped."""
    return AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


@pytest.mark.ranks(3)
def test_one_gather_and_one_reduction_per_unit():
    """However many dtypes a unit has, and whatever of it is frozen: one ring operation each."""
    accelerator = start({"name": "fsdp", "unit_from": 1, "live_units": 1})
    twins = Twins(accelerator, Case("blends", blends), trained)
    check_rows(accelerator, twins)
    strategy = accelerator.strategy_of(twins.model)
    assert [len(unit.flats) for unit in strategy.placement.units] == [1, 5, 5, 5]
    twins.backward(0)  # does not know yet which unit forward ends with
    twins.step()

    def made():
        return [calls(accelerator, each) for each in ("all_gather", "reduce_scatter")]

    for step in range(1, 4):
        gathers, reductions = made()
        loss = twins.loss(step)
        assert made() == [gathers + 4, reductions]
        accelerator.backward(loss)
        twins.backward_twin(step)
        # The last one is frozen, and still there; all others come back once.
        assert made() == [gathers + 7, reductions + 3]
        twins.step()
        assert made() == [gathers + 7, reductions + 3]
    twins.check()
    dtypes = [p.dtype for p in twins.model.parameters()]
    assert dtypes == [p.dtype for p in twins.twin.parameters()]
