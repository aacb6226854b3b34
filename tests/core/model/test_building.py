"""A recorded construction yields, bit for bit, what an ordinary one does, and holds no memory."""

import copy
import weakref

import pytest
import torch
from torch import nn

from drivetrain.errors import UsageError
from drivetrain.model.deferred import (
    ConstructionRecording,
    RecordedWeights,
    become,
    fill,
    stray_tensors,
)

CPU = torch.device("cpu")


class Holder(nn.Module):
    """Calls a function in its constructor; a tensor that this returns becomes a parameter."""

    def __init__(self, construct):
        super().__init__()
        result = construct(self)
        if result is not None:
            self.w = nn.Parameter(result)


def holding(construct):
    return lambda: Holder(lambda module: construct())


def tensors(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def record(make, seed=0):
    torch.manual_seed(seed)
    recording = ConstructionRecording()
    with recording.active():
        model = make()
    return model, recording


def assert_same(make):
    """Compare an ordinary construction with a recorded one; return the recorded model, filled."""
    torch.manual_seed(0)
    expected = make()
    state = torch.get_rng_state()
    model, recording = record(make)
    assert torch.equal(torch.get_rng_state(), state), "the generator moved on in another way"
    assert list(tensors(model)) == list(tensors(expected))
    fill(model, tensors(model), RecordedWeights([recording]), CPU)
    for name, tensor in tensors(expected).items():
        found = tensors(model)[name]
        assert torch.equal(found, tensor), name
        assert found.stride() == tensor.stride(), name
        assert found.dtype is tensor.dtype, name
        assert found.requires_grad == tensor.requires_grad, name
        assert isinstance(found, nn.Parameter) == isinstance(tensor, nn.Parameter)
    assert torch.equal(torch.get_rng_state(), state), "making values drew random numbers"
    return model


MODULES = (
    lambda: nn.Embedding(10, 8, padding_idx=2),
    lambda: nn.BatchNorm2d(3),
    lambda: nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last),
    lambda: nn.LSTM(5, 6, 2, bidirectional=True),
    lambda: nn.Transformer(16, 2, 1, 1, 32, batch_first=True),
    lambda: nn.ModuleList(copy.deepcopy(nn.Linear(3, 3)) for _ in range(2)),
    lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).bfloat16(),
    lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)),
    holding(lambda: nn.init.trunc_normal_(torch.empty(20, 30))),
    holding(lambda: nn.init.orthogonal_(torch.empty(20, 30))),
    holding(lambda: nn.init.sparse_(torch.empty(20, 30), 0.3)),
    holding(lambda: torch.randn(15)),  # small and large normals take different paths in torch
    holding(lambda: torch.multinomial(torch.rand(30), 10).float()),
)


def test_modules_and_initialisations():
    for make in MODULES:
        assert_same(make)

    def make():
        model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "c": nn.Linear(2, 4)})
        model["b"].weight.data.copy_(model["a"].weight)
        model["a"].weight.data.mul_(2)  # after it was read
        model["c"].weight = nn.Parameter(model["a"].weight.detach()[:, ::2].clone())
        model["c"].bias.data = torch.eye(4)[1]
        return model

    assert_same(make)

    def various():
        out = torch.empty(10)
        torch.normal(0.0, 1.0, (10,), out=out)
        listed = [torch.rand(3), torch.rand(4)]
        torch._foreach_mul_(listed, 2.0)
        strided = torch.randn(40, 2).t()
        strided[0].normal_()
        strided[:, ::2].uniform_()
        grown = torch.empty(0).resize_(6).fill_(1)
        like = torch.zeros(3, device=out.device).new_tensor([1, 2, 3, 4])
        return torch.cat([out, *listed, strided.flatten(), grown, like, torch.Tensor(2).fill_(3)])

    assert_same(holding(various))


def test_outside_values_count_as_they_were_when_read():
    def rewritten():
        values = torch.tensor([1.0, 2.0])
        first, second = torch.zeros(2), torch.zeros(2)
        first.copy_(values)
        values.add_(1)
        second.copy_(values)
        return torch.cat([first, second])

    def reused_memory():
        memory = bytearray(12)
        values = torch.frombuffer(memory, dtype=torch.float32)
        first = torch.zeros(3)
        first.copy_(values)
        memory[:] = b"\1" * 12  # nothing tells torch
        return first

    assert_same(holding(rewritten))
    assert_same(holding(reused_memory))

    outside = torch.ones(3)
    model, recording = record(holding(lambda: torch.zeros(3).copy_(outside)))
    outside.add_(1)
    with pytest.raises(UsageError, match=r"shape \(3,\).*changed in place; pass a clone"):
        recording.materialize([model.w])


def test_constructors_read_values_generators_and_real_tensors():
    def reading(module):
        module.rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)]
        assert module.rates == torch.linspace(0, 0.1, 4).tolist()
        chosen = torch.randn(10)
        module.register_buffer("positive", chosen[chosen.abs() > 0.5])
        module.register_buffer("places", chosen.nonzero())
        module.register_buffer("mixed", torch.tensor([chosen[0], 2.0]))
        assert not torch.equal(chosen, chosen * 2)
        return torch.randn(3, 3) if chosen[0] > 0 else torch.randn(5)

    assert_same(lambda: Holder(reading))

    def make():
        generator = torch.Generator().manual_seed(3)
        first = torch.randn(5, generator=generator)
        return torch.cat([first, torch.empty(40).normal_(generator=generator)])

    assert_same(holding(make))

    def in_double_precision():
        torch.set_default_dtype(torch.float64)
        try:
            return torch.randn(5)
        finally:
            torch.set_default_dtype(torch.float32)

    assert_same(holding(in_double_precision))

    with ConstructionRecording().active():
        tensor = torch.ones(3)
        assert tensor.device == CPU
        assert tensor.is_cpu
        assert not tensor.is_meta
        with pytest.raises(UsageError, match="data_ptr"):
            tensor.data_ptr()
    assert tensor.is_meta

    numpy = pytest.importorskip("numpy")
    with ConstructionRecording().active():
        array = torch.ones(3).numpy()
        assert numpy.asarray(torch.ones(3)).sum() == array.sum() == 3
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 2


def test_tied_weights_stay_one_parameter_and_hold_their_place():
    def make():
        model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
        model[1].weight = model[0].weight
        model[0].weight.data.mul_(2)
        model.held = [model[0].weight]
        return model

    model, recording = record(make)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    fill(model, tensors(model), RecordedWeights([recording]), CPU)
    (parameter,) = optimizer.param_groups[0]["params"]
    assert model[1].weight is model[0].weight is parameter is model.held[0]
    assert isinstance(parameter, nn.Parameter)
    assert_same(make)


def test_memory_that_is_shared_stays_shared():
    def make():
        model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
        model[1].weight = nn.Parameter(model[0].weight.data)
        model.register_buffer("first", model[0].weight.data[0])
        return model

    model = assert_same(make)
    with torch.no_grad():
        model[0].weight.fill_(5)
    assert model[1].weight.eq(5).all()
    assert model.first.eq(5).all()

    def cut(module):
        whole = torch.ones(6)
        module.register_buffer("a", whole[:4])
        module.register_buffer("b", whole[2:])

    model, recording = record(lambda: Holder(cut))
    with pytest.raises(UsageError, match=r"'b' to be the same object.*clone\(\)"):
        fill(model, tensors(model), RecordedWeights([recording]), CPU)

    model, recording = record(holding(lambda: torch.randn(100).chunk(10)[3]))
    values = RecordedWeights([recording]).value("w", model.w)
    assert values.untyped_storage().nbytes() == 40


def test_hooks_attributes_weak_references_and_views_stay():
    model, recording = record(lambda: nn.Linear(3, 2))
    seen = []
    handle = model.weight.register_hook(lambda gradient: seen.append("gradient"))
    model.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("after"))
    model.weight.kind = "matrix"
    model.bias.requires_grad_(False)
    fill(model, ["weight", "bias"], RecordedWeights([recording]), CPU)
    assert model.weight.kind == "matrix"
    assert not model.bias.requires_grad
    model(torch.ones(1, 3)).sum().backward()
    handle.remove()
    model(torch.ones(1, 3)).sum().backward()
    assert seen == ["gradient", "after", "after"]

    parameter = nn.Parameter(torch.empty(3, device="meta"))
    view, reference = parameter.view(3), weakref.ref(parameter)
    with pytest.raises(UsageError, match=r"shape \(3,\) for 'w', found \(2,\)"):
        become(parameter, torch.ones(2), "w")
    become(parameter, torch.ones(3), "w")
    assert view.is_meta
    assert reference() is parameter
    parameter.sum().backward()
    assert parameter.grad.eq(1).all()


def test_plain_attributes_are_found_and_strangers_refused():
    def attributes(module):
        module.scale = torch.ones(3)
        module.table = {"a": [torch.zeros(2)]}
        module.listed = [module.scale]
        return torch.ones(4)

    model, _ = record(lambda: Holder(attributes))
    strays = model.scale, model.table["a"][0]
    assert list(map(id, stray_tensors(model).values())) == list(map(id, strays))
    viewing, _ = record(lambda: Holder(attributes))
    viewing.view = viewing.w.data[1:]
    with pytest.raises(UsageError, match="'view' to have memory of its own"):
        stray_tensors(viewing)

    _, recording = record(lambda: nn.Linear(2, 2))
    stranger = torch.empty(3, device="meta")
    with pytest.raises(UsageError, match=r"shape \(3,\) on meta"):
        recording.materialize([stranger])
    with pytest.raises(UsageError, match=r"'w'|such as w"):
        RecordedWeights([recording]).value("w", stranger)
    with pytest.raises(UsageError, match="made outside"), recording.active():
        torch.zeros(3).copy_(stranger)


def test_facts_tell_seeds_and_outside_values_apart():
    def facts(seed, outside):
        def make():
            return nn.ParameterList([torch.randn(3), torch.zeros(3).copy_(outside)])

        model, recording = record(make, seed)
        return [list(recording.facts([tensor])) for tensor in model]

    one, other = facts(0, torch.ones(3)), facts(1, torch.zeros(3))
    assert one == facts(0, torch.ones(3))
    assert one[0] != other[0]
    assert one[1] != other[1]
