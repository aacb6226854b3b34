"""Proxies: tensors whose values exist on another stage behave, or say clearly why they cannot."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from drivetrain.errors import UsageError
from drivetrain_megatron.recording.proxy import OTHER, StageProxy, origins_in, resolve
from stacks import Doubled, Residual, Stack
from staged_twins import Twins

CPU = torch.device("cpu")


def proxy(*shape, dtype=torch.float64, requires_grad=True):
    return StageProxy.like(shape, dtype, CPU, requires_grad and dtype.is_floating_point)


def real(*shape):
    return torch.randn(*shape, dtype=torch.float64)


OPERATIONS = {
    "add": lambda x: x + 1,
    "scalar left": lambda x: 2 - x,
    "matmul": lambda x: x @ x.transpose(1, 2),
    "mT": lambda x: x.mT,
    "linear": lambda x: F.linear(x, torch.ones(5, 6, dtype=x.dtype)),
    "einsum": lambda x: torch.einsum("bij,bkj->bik", x, x),
    "sdpa": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "layer norm": lambda x: F.layer_norm(x, (6,)),
    "cross entropy": lambda x: F.cross_entropy(x.flatten(0, 1), torch.arange(8) % 6),
    "no reduction": lambda x: F.cross_entropy(x.mT, torch.zeros(2, 4).long(), reduction="none"),
    "embedding": lambda x: F.embedding(torch.tensor([[1, 0, 3]]), x[0]),
    "several results": lambda x: x.max(dim=-1).indices,
    "chunk": lambda x: x.chunk(2, dim=-1)[1],
    "stack": lambda x: torch.stack([x, x], dim=1),
    "where": lambda x: torch.where(x > 0, x, torch.zeros((), dtype=x.dtype)),
    "index": lambda x: x[:, -1, None, ::2],
    "real positions": lambda x: x[torch.tensor([1, 0, 1])],
    "real mask": lambda x: x[torch.tensor([[True, False, True, True], [False] * 4])],
    "iterate": lambda x: list(x)[1],
    "in place": lambda x: (x * 1).add_(1).masked_fill_(x > 0, 3.0),
    "augmented": lambda x: _augmented(x * 1),
    "half": lambda x: x.float().to(torch.bfloat16),
    "expand": lambda x: x[:, :1].expand(-1, 3, -1).reshape(2, 18),
    "view": lambda x: x.view(2, 4, 2, 3).permute(0, 2, 1, 3).flatten(2),
    "data": lambda x: x.data,
    "checkpoint": lambda x: checkpoint(torch.tanh, x, use_reentrant=False),
    "reentrant": lambda x: checkpoint(torch.tanh, x, use_reentrant=True),
    "dropout": lambda x: F.dropout(x, 0.5),
    "integers": lambda x: x.argmax(-1) + 1,
}


def _augmented(x):
    x += 1
    x[:, 0] = 2
    x /= 3
    return x


def test_facts_are_those_of_the_real_result():
    for name, operation in OPERATIONS.items():
        values = real(2, 4, 6).requires_grad_()
        expected = operation(values)
        state = torch.get_rng_state()
        found = operation(StageProxy.of(values))
        assert torch.equal(torch.get_rng_state(), state), "random numbers were drawn"
        assert type(found) is StageProxy
        for fact in ("shape", "dtype", "device", "requires_grad"):
            assert getattr(found, fact) == getattr(expected, fact), name


DRAWS = {
    "dropout": F.dropout,
    "like": torch.randn_like,
    "in place": lambda x: torch.empty_like(x).exponential_(),
    "by values": torch.bernoulli,
    "choices": lambda x: torch.multinomial(x, 2),
    "noisy": lambda x: F.gumbel_softmax(x) + x,
}


def test_what_a_script_draws_of_an_output_is_drawn_on_every_stage():
    values = torch.rand(2, 4)
    of_blocks = StageProxy.of(values)
    of_blocks.blocks = frozenset({0})
    for name, draw in DRAWS.items():
        states = []
        for x in (values, of_blocks):
            torch.manual_seed(0)
            draw(x)
            states.append(torch.get_rng_state())
        assert torch.equal(*states), name
        assert not torch.equal(states[0], torch.manual_seed(0).get_state())


def test_where_a_gradient_would_go_is_known_through_functions_of_the_script():
    loss, other = proxy(), proxy()
    loss.origins = frozenset({"call"})
    assert origins_in(Doubled.apply(loss) / 2) == {"call"}
    assert origins_in(loss + other) == {"call", OTHER}
    assert origins_in(loss + real(3).requires_grad_().sum()) == {"call", OTHER}
    assert not origins_in(other.detach())


USES = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool(x.sum() > 0),
    "float": lambda x: float(x.sum()),
    "int": lambda x: int(x.sum()),
    "index": lambda x: [1, 2, 3][x.long()[0, 0]],
    "format": lambda x: f"{x.sum():.3f}",
    "numpy": lambda x: x.detach().numpy(),
    "mask": lambda x: x[x > 0],
    "masked select": lambda x: x.masked_select(x > 0),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "unique": torch.unique,
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "tensor": lambda x: torch.tensor([x.sum()]),
    "membership": lambda x: 3 in x,
    "pickle": lambda x: x.__reduce_ex__(2),
    "repeats": lambda x: torch.repeat_interleave(torch.ones(2), x[:, 0].long()),
}


def test_values_are_refused_with_the_way_out():
    for use in USES.values():
        with pytest.raises(UsageError, match="another pipeline stage.*accelerator.backward"):
            use(proxy(2, 4))


WRITES = {
    "copy_": lambda target, x: target.copy_(x),
    "iadd": lambda target, x: target.__iadd__(x),
    "setitem": lambda target, x: target.__setitem__(0, x[0]),
    "out": lambda target, x: torch.add(x, x, out=target),
    "index_add_": lambda target, x: target.index_add_(0, torch.arange(2), x),
}


def test_a_real_tensor_is_not_written_from_a_proxy():
    for write in WRITES.values():
        target = real(2, 3)
        before = target.clone()
        with pytest.raises(UsageError, match="to write.*another pipeline stage"):
            write(target, proxy(2, 3))
        assert torch.equal(target, before)


def test_backward_is_the_accelerators_and_repr_never_raises():
    loss = proxy(2, 3).sum()
    assert loss.requires_grad
    for call in (loss.backward, lambda: torch.autograd.grad(loss, [loss])):
        with pytest.raises(UsageError, match=r"accelerator\.backward"):
            call()
    for x in (proxy(2, 3), proxy(), proxy(2, dtype=torch.long)):
        assert "another pipeline stage" in repr(x)
        assert "another pipeline stage" in f"{x} {[x]}"


DERIVED = {
    "detach": lambda x: x.detach(),
    "divided": lambda x: x / 4,
    "times": lambda x: 2 * x.float(),
    "clone": lambda x: x.clone().mean(),
    "stacked": lambda x: torch.stack([x, x * 3]).mean(),
    "with real": lambda x: x * torch.tensor(3.0, dtype=torch.float64),
    "in place": lambda x: _times(x * 1),
    "part": lambda x: torch.stack([x, x + 1]).max(0).values,
    "item of a sum": lambda x: sum([x, x, x]),
}


def _times(x):
    x *= 5
    x -= 1
    return x


def test_what_follows_from_a_resolved_loss_has_a_value():
    for derive in DERIVED.values():
        loss = proxy()
        derived = derive(loss)
        with pytest.raises(UsageError):
            derived.item()
        value = torch.tensor(8.5, dtype=torch.float64)
        resolve(loss, value)
        assert derived.item() == derive(value).item()
        assert f"{derived:.3f}" == f"{derive(value).item():.3f}"
        assert loss.item() == 8.5


def test_collectives_on_proxies_are_refused(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(UsageError, match="c10d.*another pipeline stage"):
            dist.all_reduce(proxy(2, requires_grad=False))
    finally:
        dist.destroy_process_group()


# --- parameters of other stages stand under their names: facts, whole inside of ``gathered`` ---


WIDTH = 4
X = torch.linspace(-1, 1, 6 * WIDTH).view(6, WIDTH)


class Tied(Stack):
    """The last layer has the weight of the first; calls are counted around the blocks."""

    def __init__(self, blocks=4):
        first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        super().__init__(
            [Residual(WIDTH) for _ in range(blocks)], first=first, last=last, tied=True
        )
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.number = 0

    def forward(self, x):
        self.calls += 1
        self.number += 1
        return super().forward(x)


def trained(**options):
    torch.manual_seed(0)
    made = {"make": lambda parameters: torch.optim.SGD(parameters, lr=0.1), **options}
    both = Twins(Tied(), (X[:2],), **made)
    both.backward(*(y.square().mean() for y in both(X)), rtol=1e-5)
    return both


def refused(match, use, *args):
    with pytest.raises(UsageError, match=match):
        use(*args)


@pytest.mark.ranks(2)
def test_what_names_of_other_stages_say():
    both = trained()
    model, twin, rank = both.model, both.twin, both.accelerator.mesh["pp"].rank
    shapes = [(n, p.shape) for n, p in twin.named_parameters()]
    assert [(n, p.shape) for n, p in model.named_parameters()] == shapes
    other = model.blocks[0 if rank else 3].up.weight
    listed = next(model.blocks[0 if rank else 3].parameters())
    elsewhere = "another pipeline stage"
    for parameter in (other, listed):
        refused(elsewhere, lambda p=parameter: p.grad.norm().item())
        refused(elsewhere, parameter.sum().item)
    refused(elsewhere, nn.utils.clip_grad_norm_, list(model.parameters()), 1.0)
    for use in (copy.deepcopy, lambda m: torch.save(m, io.BytesIO())):
        refused(r"stage \d has; copy it before .*gathered\(model\).*get_state_dict", use, model)
    for parameter in (*model.parameters(), *twin.parameters()):
        parameter.grad.mul_(2.0)  # on every stage: also on that which has it
    both.step()
    assert all(p.grad is None for p in model.parameters())
    if rank:  # the copy is of before the step
        refused(elsewhere, model.last.weight.sum().item)
    else:
        torch.testing.assert_close(model.last.weight, twin.last.weight)
    found = model.state_dict()
    assert list(found) == list(twin.state_dict())
    torch.testing.assert_close(found, twin.state_dict())
    assert found["first.weight"] is found["last.weight"]


@pytest.mark.ranks(2)
def test_parameters_keep_their_places():
    """A place that gets another parameter is refused, whichever stages the two are on."""
    both = trained()
    model, blocks = both.model, both.model.blocks
    model.last.weight = model.first.weight  # which they are
    model.first.weight = model.last.weight
    for layer, other in ((blocks[0], blocks[1]), (blocks[3], blocks[0])):
        refused("'weight' of Linear is .* replaced", setattr, layer.up, "weight", other.up.weight)
    refused("'bias' of Linear is .* replaced", setattr, blocks[0].up, "bias", None)
    both.backward(*(y.square().mean() for y in both(X)), rtol=1e-5)
    both.check_gradients()


@pytest.mark.ranks(2)
def test_inside_of_gathered_all_are_whole_and_copies_compute_by_themselves():
    both = trained()
    both.step()
    with both.accelerator.gathered(both.model):
        copied = copy.deepcopy(both.model)
        for mine, theirs in zip(both.model.parameters(), both.twin.parameters(), strict=True):
            torch.testing.assert_close(mine.data, theirs.data)
            with torch.no_grad():
                mine.mul_(0.5)
        refused("not to be called while", both.model, X)
    torch.testing.assert_close(copied(X), both.twin(X))
    with torch.no_grad():
        for theirs in both.twin.parameters():
            theirs.mul_(0.5)
        torch.testing.assert_close(*both(X))


@pytest.mark.parametrize("options", [{}, {"schedule": "interleaved", "chunks": 2}])
@pytest.mark.ranks(2)
def test_a_forward_counts_once(options):
    both = Twins(Tied(), (X[:2],), **options)
    for rows in (6, 3, 1):
        both.backward(*(y.square().mean() for y in both(X[:rows])), rtol=1e-5)
        both.twin(X[:rows])
        with torch.no_grad():
            both.model(X[:rows])
    assert both.model.number == both.twin.number == 6
    both.check_state()
