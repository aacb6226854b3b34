"""Proxies: tensors whose values exist on another stage behave, or say clearly why they cannot."""

import copy
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils.checkpoint import checkpoint

from drivetrain.errors import UsageError
from drivetrain_megatron.recording.proxy import StageProxy, resolve

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


@pytest.mark.parametrize("name", list(OPERATIONS))
def test_facts_are_those_of_the_real_result(name):
    values = real(2, 4, 6).requires_grad_()
    expected = OPERATIONS[name](values)
    state = torch.get_rng_state()
    found = OPERATIONS[name](StageProxy.of(values))
    assert torch.equal(torch.get_rng_state(), state), "random numbers were drawn"
    assert type(found) is StageProxy
    assert (found.shape, found.dtype, found.device) == (
        expected.shape,
        expected.dtype,
        expected.device,
    )
    assert found.requires_grad == expected.requires_grad


def test_strides_are_real_so_that_views_fail_where_they_would():
    x = proxy(2, 4, 6).transpose(0, 1)
    assert not x.is_contiguous()
    with pytest.raises(RuntimeError, match="view size"):
        x.view(-1)


def test_shapes_that_do_not_fit_raise_as_they_would():
    with pytest.raises(RuntimeError, match="reduction dim"):
        proxy(2, 3) @ proxy(2, 3)


@pytest.mark.parametrize("function", [F.linear, torch.matmul, F.layer_norm])
def test_autocast_gives_the_dtype_that_it_would(function):
    def call(x):
        w = torch.ones(6, 6)
        return function(x, (6,)) if function is F.layer_norm else function(x, w)

    with torch.autocast("cpu", torch.bfloat16):
        expected = call(torch.ones(2, 6)).dtype
        assert call(proxy(2, 6, dtype=torch.float32)).dtype == expected
    assert call(proxy(2, 6, dtype=torch.float32)).dtype == torch.float32


def test_autocast_keeps_no_cast_weight_without_history():
    weight = nn.Parameter(torch.ones(6, 6))
    with torch.autocast("cpu", torch.bfloat16):
        F.linear(proxy(2, 6, dtype=torch.float32), weight)
        F.linear(torch.ones(2, 6), weight).sum().backward()
    assert weight.grad is not None


def test_gradients_are_off_inside_of_no_grad():
    x = proxy(2, 3)
    with torch.no_grad():
        assert not (x * 2).requires_grad
    assert (x * 2).requires_grad
    assert not x.detach().requires_grad


def test_real_tensors_alone_are_not_touched():
    x = real(3)
    proxy(3) + x
    assert type(x + 1) is torch.Tensor


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


@pytest.mark.parametrize("name", list(USES))
def test_values_are_refused_with_the_way_out(name):
    with pytest.raises(UsageError, match="another pipeline stage.*accelerator.backward"):
        USES[name](proxy(2, 4))


WRITES = {
    "copy_": lambda target, x: target.copy_(x),
    "iadd": lambda target, x: target.__iadd__(x),
    "setitem": lambda target, x: target.__setitem__(0, x[0]),
    "out": lambda target, x: torch.add(x, x, out=target),
    "index_add_": lambda target, x: target.index_add_(0, torch.arange(2), x),
}


@pytest.mark.parametrize("name", list(WRITES))
def test_a_real_tensor_is_not_written_from_a_proxy(name):
    target = real(2, 3)
    before = target.clone()
    with pytest.raises(UsageError, match="to write.*another pipeline stage"):
        WRITES[name](target, proxy(2, 3))
    assert torch.equal(target, before)


def test_backward_is_the_accelerators():
    loss = proxy(2, 3).sum()
    assert loss.requires_grad
    for call in (loss.backward, lambda: torch.autograd.grad(loss, [loss])):
        with pytest.raises(UsageError, match=r"accelerator\.backward"):
            call()


def test_constants_are_real():
    x = proxy(2, 3)
    ones = torch.ones_like(x, dtype=torch.long)
    assert type(ones) is torch.Tensor
    assert torch.equal(ones, torch.ones(2, 3, dtype=torch.long))
    assert torch.equal(x.new_full((2,), 7), torch.full((2,), 7, dtype=torch.float64))
    assert torch.equal(torch.full_like(x, 3), torch.full((2, 3), 3, dtype=torch.float64))


def test_repr_never_raises():
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


@pytest.mark.parametrize("name", list(DERIVED))
def test_what_follows_from_a_resolved_loss_has_a_value(name):
    loss = proxy()
    derived = DERIVED[name](loss)
    with pytest.raises(UsageError):
        derived.item()
    value = torch.tensor(8.5, dtype=torch.float64)
    resolve(loss, value)
    assert derived.item() == DERIVED[name](value).item()
    assert f"{derived:.3f}" == f"{DERIVED[name](value).item():.3f}"
    assert loss.item() == 8.5


def test_operations_on_a_resolved_loss_are_real():
    loss = proxy()
    resolve(loss, torch.tensor(2.0))
    assert type(loss * 2) is torch.Tensor
    assert loss > 1
    assert float(loss) == 2.0
    assert "2." in repr(loss)
    total = torch.zeros((), dtype=torch.float64)
    total += loss.detach()
    assert total == 2


def test_in_place_leaves_what_others_follow_from():
    loss = proxy()
    total = loss * 1
    before = total + 0
    total += 1
    resolve(loss, torch.tensor(2.0))
    assert (before.item(), total.item(), loss.item()) == (2, 3, 2)


def test_a_running_sum_of_losses_stays_short():
    total = torch.zeros((), dtype=torch.float64)
    for step in range(1500):
        loss = proxy()
        total = total + loss.detach()
        resolve(loss, torch.tensor(float(step)))
    assert total.item() == sum(range(1500))


def test_an_unresolved_running_sum_stays_short():
    total = proxy()
    for _ in range(1500):
        total = total + proxy()
    assert total.value() is None


def test_a_wrong_shape_does_not_resolve():
    with pytest.raises(UsageError, match="shape"):
        resolve(proxy(), torch.ones(2))


def test_a_copy_is_a_proxy():
    assert copy.deepcopy(proxy(2, 3)).shape == (2, 3)


def test_modules_with_real_weights_take_proxies():
    x = proxy(2, 4, 8)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dtype=torch.float64)
    assert layer(x).shape == (2, 4, 8)
    assert type(layer.eval()(x)) is StageProxy
    norm = nn.BatchNorm1d(4, dtype=torch.float64)
    norm(x)
    assert torch.equal(norm.running_mean, torch.zeros(4, dtype=torch.float64))


def test_an_operation_is_cheap():
    x, weight = proxy(64, 128), real(128, 128)
    best = float("inf")
    for _ in range(5):
        started = time.thread_time()
        for _ in range(100):
            F.gelu(F.linear(x, weight)) + x
        best = min(best, (time.thread_time() - started) / 300)
    assert best < 300e-6, f"{best * 1e6:.0f} microseconds"


def test_work_is_counted_once_per_call():
    assert F.linear(proxy(4, 8), real(3, 8)).work == 2 * 4 * 8 * 3
    assert F.linear(proxy(4, 8), real(3, 8)).work == 2 * 4 * 8 * 3
    query = proxy(2, 4, 5, 8)
    assert F.scaled_dot_product_attention(query, query, query).work == 2 * 2 * (2 * 4 * 5 * 5 * 8)


def test_a_function_that_communicates_tells_its_shapes():
    def gather(tensor, ranks):
        if has_torch_function_unary(tensor):
            return handle_torch_function(gather, (tensor,), tensor, ranks)
        raise AssertionError("nothing is sent")

    gather.without_values = lambda tensor, ranks: torch.cat([tensor] * ranks)
    found = gather(proxy(2, 3), 4)
    assert (found.shape, found.requires_grad) == ((8, 3), True)


def test_collectives_on_proxies_are_refused(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(UsageError, match="c10d.*another pipeline stage"):
            dist.all_reduce(proxy(2, requires_grad=False))
    finally:
        dist.destroy_process_group()
