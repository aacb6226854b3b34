"""Secondary shards: ``secondary: host`` keeps all values on each host, divided over its ranks."""

import os
from collections import Counter

import pytest
import torch
from torch import nn
from torch.optim import SGD

from drivetrain import Accelerator
from drivetrain.cost import ModelSpec
from drivetrain.errors import ConfigError, UsageError
from drivetrain.parallel import unit as near
from drivetrain.testing.conformance.suite import everyone, weights

HOSTS, WIDTH, LAYERS = 2, 64, 4
MATRIX = 4 * WIDTH * WIDTH
"""Bytes of a layer: large enough that a method approximates its updates."""


FORMS = [{"name": "zero3", "keep_below": 0}, {"name": "fsdp"}]


def start(monkeypatch, form, secondary="host", links=None, **run):
    """Let ranks believe in two hosts: a host's name has torchrun's number of the host as a part."""
    size = int(os.environ["WORLD_SIZE"])
    monkeypatch.setenv("GROUP_RANK", str(int(os.environ["RANK"]) * HOSTS // size))
    config = {"strategy": {**form, "secondary": secondary}, "links": {"far": links or {}}, **run}
    return Accelerator(config=config, cpu=True)


def layers():
    torch.manual_seed(5)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def batch(step, rank):
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def train(accelerator, model, optimizer, steps):
    for step in steps:
        accelerator.backward(model(batch(step, accelerator.process_index)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def prepared(accelerator, lr=0.1):
    model = layers()
    return accelerator.prepare(model, SGD(model.parameters(), lr=lr))


def units_of(accelerator, model):
    return accelerator.strategy_of(model).placement.units


def growth(accelerator, work):
    """Return the bytes that this rank sends in some work, by (axis, operation)."""
    before = Counter(accelerator.traffic.sent())
    work()
    return {key: n for key, n in (Counter(accelerator.traffic.sent()) - before).items() if n}


@pytest.mark.parametrize("world", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (2, 4)])
def test_only_what_is_stepped_crosses_hosts(monkeypatch, world):
    """A layer is frozen at first, beside a trained one: the other hosts have its values already."""
    accelerator = start(monkeypatch, FORMS[world == 4])
    each = iter(layers())
    model = nn.Sequential(*(nn.Sequential(*pair) for pair in zip(each, each, strict=True)))
    model[0][0].requires_grad_(False)
    spec = ModelSpec.of(model)
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    strategy = accelerator.strategy_of(model)
    train(accelerator, model, optimizer, range(2))
    cost = type(strategy).cost(strategy.config, spec, strategy.run)
    held = sum(k.nbytes for unit in strategy.placement.units for k in unit.secondary.kept)
    assert held == cost.held["secondary"] == LAYERS * MATRIX * HOSTS // world
    part = (LAYERS - 1) * MATRIX // world
    for thawed in (0, 1):
        model[0][0].requires_grad_(bool(thawed))
        found = growth(accelerator, lambda: train(accelerator, model, optimizer, range(2, 3)))
        assert ("dp", "all_gather") not in found
        more = part + thawed * MATRIX // world  # to one other host, once
        assert found["dp.far", "all_gather"] == more
        assert found["dp.far" if world > HOSTS else "dp", "reduce_scatter"] == more
        with torch.no_grad():  # nothing has changed since the last step
            passed = growth(accelerator, lambda: model(batch(3, 0)))
        assert passed.keys() <= {("dp.near", "all_gather")}
        if not thawed:
            assert {k: n for k, n in cost.sent.items() if "far" in k[0]}.items() <= found.items()


@pytest.mark.ranks(4)
def test_changed_and_loaded_values_reach_secondary_shards(monkeypatch, tmp_path):
    """Edits of one rank, and a checkpoint of ranks without the option; no writes in a forward."""
    accelerator = start(monkeypatch, FORMS[0], "none")
    model, optimizer = prepared(accelerator)
    train(accelerator, model, optimizer, range(2))
    accelerator.save_state(tmp_path)
    saved = weights(accelerator, model)
    train(accelerator, model, optimizer, range(2, 3))
    expected = weights(accelerator, model)

    accelerator = start(monkeypatch, FORMS[0])
    model, optimizer = prepared(accelerator)
    train(accelerator, model, optimizer, range(7, 9))
    with accelerator.gathered(model):
        if accelerator.is_main_process:
            nn.init.constant_(model[1].weight, 0.25)
    check_forward(accelerator, model)
    assert (weights(accelerator, model)["1.weight"] == 0.25).all()

    def halve(module, inputs):
        with torch.no_grad():
            module.weight.mul_(0.5)

    handle = model[1].register_forward_pre_hook(halve)
    with pytest.raises(UsageError, match="other hosts keep copies by secondary: host"):  # noqa: SIM117
        with torch.no_grad():
            model(batch(0, 0))
    handle.remove()

    accelerator.load_state(tmp_path)
    check_forward(accelerator, model)
    found = weights(accelerator, model)
    assert all(torch.equal(value, saved[name]) for name, value in found.items())
    train(accelerator, model, optimizer, range(2, 3))
    found = weights(accelerator, model)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def check_forward(accelerator, model):
    """Compare the values of a forward, which are those of hosts, with those of their owners."""
    seen = {}

    def look(module, inputs):
        seen[module] = module.weight.detach().clone()

    handles = [layer.register_forward_pre_hook(look) for layer in model]
    with torch.no_grad():
        model(batch(0, 0))
    for handle in handles:
        handle.remove()
    owned = weights(accelerator, model)
    for index, layer in enumerate(model):
        assert torch.equal(seen[layer], owned[f"{index}.weight"]), index


@pytest.mark.parametrize("form", FORMS, ids=["zero3", "fsdp"])
@pytest.mark.ranks(2)
def test_hosts_keep_the_same_approximate_values(monkeypatch, tmp_path, form):
    """Owners have other values, and what a script reads and saves is theirs."""
    accelerator = start(monkeypatch, form, links={"gradients": "int8", "parameters": "topk"})
    model, optimizer = prepared(accelerator, 0.5)
    train(accelerator, model, optimizer, range(3))
    for unit in units_of(accelerator, model):
        unit.secondary.wait()
        kept = torch.cat(unit.secondary.kept)
        assert all(torch.equal(other, kept) for other in everyone(kept))
    outputs = everyone(model(batch(9, 0)).detach())
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    exact = weights(accelerator, model)
    with accelerator.gathered(model):
        owned = model(batch(9, 0)).detach()
    apart = (owned - outputs[0]).abs().max()
    assert 0 < apart < 0.2 * owned.abs().max()
    accelerator.save_state(tmp_path)
    train(accelerator, model, optimizer, range(3, 4))
    accelerator.load_state(tmp_path)
    found = weights(accelerator, model)
    assert all(torch.equal(value, exact[name]) for name, value in found.items())
    assert torch.equal(model(batch(9, 0)).detach(), owned), "loaded values are exact everywhere"


@pytest.mark.ranks(2)
def test_skipped_steps_one_host_and_dtensors(monkeypatch):
    """No updates are sent for the first; on the second nothing changes; the third are refused."""
    far = {"gradients": "int8", "parameters": "int8"}
    accelerator = start(monkeypatch, FORMS[0], links=far, on_nonfinite="skip")
    model, optimizer = prepared(accelerator, 0.5)
    train(accelerator, model, optimizer, range(2))
    before = model(batch(9, 0)).detach()

    def skipped():
        factor = float("nan") if accelerator.process_index else 1.0
        accelerator.backward(factor * model(batch(3, 0)).square().mean())
        optimizer.step()
        assert accelerator.optimizer_step_was_skipped
        optimizer.zero_grad()

    assert ("dp.far", "all_gather") not in growth(accelerator, skipped)
    assert torch.equal(model(batch(9, 0)).detach(), before)

    accelerator = start(monkeypatch, FORMS[1])
    model, _ = prepared(accelerator)
    with pytest.raises(UsageError, match="expected secondary: none with DTensors"):
        accelerator.dtensors(model)

    monkeypatch.delenv("GROUP_RANK", raising=False)
    said = []
    monkeypatch.setattr(near.logger, "announce", said.append)
    accelerator = Accelerator(strategy={**FORMS[0], "secondary": "host"}, cpu=True)
    model, optimizer = prepared(accelerator)
    train(accelerator, model, optimizer, range(2))
    assert all(unit.secondary is None for unit in units_of(accelerator, model))
    assert [line for line in said if "secondary: host changes nothing" in line] == said
    assert len(said) == 1


def test_options_that_do_not_fit():
    for form, named in (
        ({"name": "zero3", "reshard_after_forward": 2}, "reshard_after_forward: true or false"),
        ({"name": "zero3", "offload": {"optimizer": "cpu"}}, "no store with secondary: host"),
        ({"name": "fsdp", "sharding": "hybrid"}, "secondary only with sharding: full"),
        ({"name": "fsdp", "sharding": "grad"}, "secondary only with sharding: full"),
    ):
        with pytest.raises(ConfigError, match=named):
            Accelerator(strategy={**form, "secondary": "host"}, cpu=True)
