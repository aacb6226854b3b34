"""1-bit Adam under ddp: the algorithm of one process, equal ranks, errors, checkpoints."""

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW

from drivetrain import Accelerator
from drivetrain.config.schema import FarConfig, LinksConfig
from drivetrain.cost import ModelSpec
from drivetrain.errors import ConfigError, UsageError
from drivetrain.links.chosen import LinkMethods
from drivetrain.runtime.precision import Precision
from drivetrain_ddp import Ddp, DdpConfig
from one_bit_steps import (
    LIMIT,
    STEPS,
    WARMUP,
    Awkward,
    batch,
    check_other_optimizers,
    lose_nothing,
    optimizer_of,
    reference,
    spoil_branch,
    spread,
    weights,
)


def accelerator_of(
    exchange: str = "momentum", bucket_mib: float = 0.02, **options: object
) -> Accelerator:
    far = {"gradients": "onebit", "warmup_steps": WARMUP, **options.pop("far", {})}
    own = {"name": "ddp", "exchange": exchange, "bucket_mib": bucket_mib}
    own["first_bucket_mib"] = bucket_mib
    return Accelerator(config={"strategy": own, "links": {"far": far}, **options}, cpu=True)


def prepared(accelerator: Accelerator, kind: type = AdamW) -> tuple[nn.Module, Adam]:
    model = Awkward()
    return accelerator.prepare(model, optimizer_of(model, kind))


def train(accelerator: Accelerator, model: nn.Module, optimizer: Adam, steps: range) -> None:
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + step)
        tokens, branch = batch(step, accelerator.process_index)
        accelerator.backward(model(tokens, branch=branch))
        optimizer.step()
        optimizer.zero_grad()


def check_equal_ranks(accelerator: Accelerator, model: nn.Module, optimizer: Adam) -> None:
    for parameter in model.parameters():
        state = optimizer.state.get(parameter, {})
        for value in (parameter.detach(), *state.values()):
            everyone = accelerator.gather(value.reshape(1, -1))
            assert all(torch.equal(everyone[0], each) for each in everyone)


@pytest.mark.parametrize("world", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (2, 4)])
def test_with_an_exact_method_training_is_the_algorithm_in_one_process(monkeypatch, world):
    """Over two hosts, with one rank or two ranks each."""
    spread(monkeypatch, world // 2)
    for kind in (Adam, AdamW):
        accelerator = accelerator_of()
        model, optimizer = prepared(accelerator, kind)
        method = accelerator.strategy_of(model).run.links.gradients
        with monkeypatch.context() as patch:
            lose_nothing(patch, method)
            train(accelerator, model, optimizer, range(STEPS))
        expected = weights(reference(world, kind))
        for name, value in weights(model).items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=LIMIT, msg=name)
        check_equal_ranks(accelerator, model, optimizer)
        accelerator.free_memory()


@pytest.mark.ranks(2)
def test_with_signs_ranks_stay_equal_and_bytes_are_as_promised(monkeypatch):
    spread(monkeypatch)
    accelerator = accelerator_of(bucket_mib=25)  # whose order is the promised one
    model, optimizer = prepared(accelerator)
    train(accelerator, model, optimizer, range(WARMUP + 1))
    strategy = accelerator.strategy_of(model)
    promised = Ddp.cost(strategy.config, ModelSpec.of(Awkward(), states=2), strategy.run)
    before = accelerator.traffic.sent()
    train(accelerator, model, optimizer, range(WARMUP + 1, STEPS))
    after = accelerator.traffic.sent()
    sent = {key: (after[key] - before.get(key, 0)) / (STEPS - WARMUP - 1) for key in after}
    if accelerator.is_main_process:
        assert {key: count for key, count in sent.items() if count} == promised.sent
    check_equal_ranks(accelerator, model, optimizer)
    expected, exact = weights(model), weights(reference(2, AdamW))
    apart = max(float((expected[name] - exact[name]).abs().max()) for name in exact)
    assert apart > LIMIT, "nothing was approximate"
    assert torch.equal(expected["table.weight"][-9:], Awkward().table.weight[-9:]) is False
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_a_checkpoint_goes_on_on_one_host_with_exact_steps(monkeypatch, tmp_path):
    spread(monkeypatch)
    accelerator = accelerator_of()
    model, optimizer = prepared(accelerator)
    train(accelerator, model, optimizer, range(WARMUP + 2))
    accelerator.save_state(tmp_path)
    accelerator.free_memory()
    found = []
    for exchange, far in (("momentum", {}), ("gradients", {"gradients": "exact"})):
        monkeypatch.setenv("GROUP_RANK", "0")
        accelerator = accelerator_of(exchange, far=far)
        model, optimizer = prepared(accelerator)
        accelerator.load_state(tmp_path)
        train(accelerator, model, optimizer, range(WARMUP + 2, STEPS))
        found.append(weights(model))
        accelerator.free_memory()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.ranks(2)
def test_what_crossed_and_what_is_kept_are_the_momenta_of_all_gradients(monkeypatch):
    spread(monkeypatch)
    accelerator = accelerator_of()
    model, optimizer = prepared(accelerator)
    train(accelerator, model, optimizer, range(WARMUP))
    strategy = accelerator.strategy_of(model)
    parameter = model.inner.weight
    beta = optimizer.param_groups[0]["betas"][0]
    due = torch.zeros_like(parameter)
    crossed = torch.zeros_like(parameter)
    for step in range(WARMUP, STEPS):
        before = optimizer.state[parameter]["exp_avg"].clone()
        tokens, branch = batch(step, accelerator.process_index)
        loss = model(tokens, branch=branch)
        (own,) = torch.autograd.grad(loss, parameter, retain_graph=True)  # of this rank alone
        accelerator.backward(loss)
        due += beta * before + (1 - beta) * accelerator.reduce(own, "mean")
        crossed += beta * before + (1 - beta) * parameter.grad
        optimizer.step()
        optimizer.zero_grad()
    kept = torch.zeros(parameter.numel())
    for shard in strategy.shards():
        if shard.name == "inner.weight" and shard.state.startswith("links.error."):
            first = int(shard.state.rpartition(".")[2])
            kept[first : first + shard.tensor.numel()] += shard.tensor
    kept = accelerator.reduce(kept, "sum").view_as(parameter)
    assert kept.abs().max() > 1e-4 * due.abs().max()
    torch.testing.assert_close(crossed + kept, due, rtol=0, atol=1e-6)
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_a_step_that_is_not_finite_leaves_momenta_and_errors_as_they_were(monkeypatch):
    spread(monkeypatch)
    found = []
    for bad in (False, True):
        accelerator = accelerator_of(on_nonfinite="skip")
        model, optimizer = prepared(accelerator)
        train(accelerator, model, optimizer, range(WARMUP + 2))
        if bad:
            spoil_branch(accelerator, model)
            optimizer.step()
            assert accelerator.optimizer_step_was_skipped
            optimizer.zero_grad()
        train(accelerator, model, optimizer, range(WARMUP + 2, STEPS))
        found.append(weights(model))
        accelerator.free_memory()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.ranks(2)
def test_parameters_of_another_model_step_as_ever(monkeypatch):
    spread(monkeypatch)
    accelerator = accelerator_of()
    first, second = nn.Linear(64, 64), nn.Linear(64, 64)
    optimizer = AdamW([*first.parameters(), *second.parameters()], lr=0.01)
    second = accelerator.prepare(second, strategy={"name": "ddp"})
    first, optimizer = accelerator.prepare(first, optimizer)
    for step in range(WARMUP + 2):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        accelerator.backward((10.0**step) * second(first(x)).square().mean())
        before = optimizer.state.get(second.weight, {}).get("exp_avg_sq", torch.zeros(1)).clone()
        optimizer.step()
        assert optimizer.state[second.weight]["exp_avg_sq"].mean() > 2 * before.mean()
        optimizer.zero_grad()
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_groups_and_parameters_that_come_later_are_checked(monkeypatch):
    spread(monkeypatch)
    accelerator = accelerator_of()
    model = nn.Linear(64, 64)
    model, optimizer = accelerator.prepare(model, AdamW([model.weight], lr=0.01))
    optimizer.add_param_group({"params": [model.bias], "maximize": True})
    accelerator.backward(model(torch.ones(2, 64)).square().mean())
    with pytest.raises(ConfigError, match="AdamW without amsgrad, maximize"):
        optimizer.step()
    low = nn.Linear(64, 64).bfloat16()
    with pytest.raises(ConfigError, match="momenta and variances of fp32"):
        accelerator.prepare(low, AdamW(low.parameters()))
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_no_element_moves_further_than_adam_would_move_it(monkeypatch):
    """Of the numbers of a block some have next to no gradient, and signs send the same for all."""
    spread(monkeypatch)
    accelerator = accelerator_of()
    layer = nn.Linear(64, 64, bias=False)
    layer, optimizer = accelerator.prepare(layer, Adam(layer.parameters(), lr=0.01))
    for step in range(WARMUP + 3):
        before = layer.weight.detach().clone()
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        x[:, 0] *= 1e-12
        accelerator.backward(layer(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        longest = 0.01 * (1 - 0.9) / (1 - 0.999) ** 0.5
        assert (layer.weight.detach() - before).abs().max() <= longest * (1 + 1e-4)
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_other_optimizers_closures_and_clipping_are_refused_on_every_rank(monkeypatch):
    spread(monkeypatch)
    accelerator = accelerator_of()
    check_other_optimizers(accelerator, Awkward())
    model, optimizer = prepared(accelerator)
    train(accelerator, model, optimizer, range(WARMUP + 1))
    tokens, branch = batch(0, 0)
    accelerator.backward(model(tokens, branch=branch))
    with pytest.raises(UsageError, match="no clipping by norm"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(UsageError, match="without a closure"):
        optimizer.step(lambda: 0.0)
    accelerator.free_memory()


def check_links(far: FarConfig, precision: str = "no", **options: str) -> None:
    config = DdpConfig(exchange="momentum", **options)
    Ddp.check_options(config, Precision.of(precision))
    Ddp.check_links(config, LinkMethods.configured(LinksConfig(far=far)), Precision.of(precision))


def test_options_that_do_not_go_together_are_refused():
    signs = FarConfig(gradients="onebit", warmup_steps=9)
    check_links(signs)
    for method in ("exact", "bf16", "auto"):
        with pytest.raises(ConfigError, match="a method with a trajectory of its own"):
            check_links(FarConfig(gradients=method, warmup_steps=9))
    with pytest.raises(ConfigError, match="warmup_steps of at least 1"):
        check_links(FarConfig(gradients="onebit"))
    with pytest.raises(ConfigError, match="fp16"):
        check_links(signs, "fp16")
    with pytest.raises(ConfigError, match="hook: none"):
        check_links(signs, hook="bf16")
