"""1-bit Adam between groups of hybrid sharding: the algorithm of one process, and its limits."""

import functools

import pytest
import torch
from torch.optim import Adam, AdamW
from torch.utils.data import DataLoader

from drivetrain import Accelerator
from drivetrain.config.schema import FarConfig, LinksConfig
from drivetrain.cost import ModelSpec
from drivetrain.errors import ConfigError, UsageError
from drivetrain.links.chosen import LinkMethods
from drivetrain.runtime.precision import Precision
from drivetrain.sharding.options import OffloadOptions
from drivetrain_fsdp import Fsdp, FsdpConfig
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

PLAIN = Precision.of("no")
FURTHEST = 2 * sum(0.01 / (1 + step) for step in range(WARMUP + 1, STEPS)) / 0.001**0.5 / 10
"""How far two runs come apart after a checkpoint, by Adam's own bound of a step."""

WIDTH = 96
"""So that half of a matrix has the 2,048 elements from which a method takes it."""


def accelerator_of(exchange="momentum", *, name="fsdp", window=1, **options):
    far = {"gradients": "onebit", "warmup_steps": WARMUP, **options.pop("far", {})}
    strategy = {"name": name, "exchange": exchange}
    if name == "fsdp":
        strategy |= {"sharding": "hybrid", "unit_from": 1000}
    return Accelerator(
        config={"strategy": strategy, "links": {"far": far}, **options},
        cpu=True,
        gradient_accumulation_steps=window,
    )


def prepared(accelerator, kind=AdamW):
    model = Awkward(WIDTH)
    return accelerator.prepare(model, optimizer_of(model, kind))


def train(accelerator, model, optimizer, steps, *, together=1, window=1):
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + step)
        for micro in range(window):
            with accelerator.accumulate(model):
                tokens, branch = batch(step, accelerator.process_index, micro, together)
                accelerator.backward(model(tokens, branch=branch))
                optimizer.step()
                optimizer.zero_grad()


def whole(accelerator, model):
    with accelerator.strategy_of(model).gathered(model.parameters(), modify=False):
        return weights(model)


def check_equal_groups(accelerator, model, optimizer):
    """Ranks with the same rows have the same bits of them, and of their states."""
    replicas = accelerator.strategy_of(model).ranks.replicas
    inner = optimizer.optimizer
    held = [each for group in inner.param_groups for each in group["params"]]
    for fragment in held:
        for value in (fragment.detach(), *inner.state.get(fragment, {}).values()):
            highest, lowest = value.clone(), -value
            replicas.all_reduce(highest, reduction="max", label="values of all groups").wait()
            replicas.all_reduce(lowest, reduction="max", label="values of all groups").wait()
            assert torch.equal(highest, value)
            assert torch.equal(-lowest, value)


def check_against_one_process(monkeypatch, ranks, kinds, together=1, window=1):
    spread(monkeypatch, together)
    for kind in kinds:
        accelerator = accelerator_of(window=window)
        model, optimizer = prepared(accelerator, kind)
        with monkeypatch.context() as patch:
            lose_nothing(patch, accelerator.strategy_of(model).run.links.gradients)
            train(accelerator, model, optimizer, range(STEPS), together=together, window=window)
        found = whole(accelerator, model)
        expected = reference(ranks, kind, width=WIDTH, window=window, together=together)
        for name, value in weights(expected).items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=LIMIT, msg=name)
        check_equal_groups(accelerator, model, optimizer)
        accelerator.free_memory()


@pytest.mark.ranks(4)
def test_with_an_exact_method_windows_of_two_groups_are_the_algorithm_in_one_process(monkeypatch):
    check_against_one_process(monkeypatch, 4, [AdamW], together=2, window=2)


@pytest.mark.ranks(2)
def test_groups_of_one_rank_are_the_algorithm_too(monkeypatch):
    check_against_one_process(monkeypatch, 2, [Adam, AdamW])


@pytest.mark.ranks(4)
def test_with_signs_groups_stay_equal_bytes_are_as_promised_and_a_checkpoint_goes_on(
    monkeypatch, tmp_path
):
    """A step that is not finite leaves momenta and errors as they were: a run without is equal."""
    spread(monkeypatch, 2)
    accelerator = accelerator_of(on_nonfinite="skip")
    model, optimizer = prepared(accelerator)
    train(accelerator, model, optimizer, range(WARMUP + 1), together=2)
    accelerator.save_state(tmp_path)
    strategy = accelerator.strategy_of(model)
    promised = Fsdp.cost(strategy.config, ModelSpec.of(model, states=2), strategy.run)
    train(accelerator, model, optimizer, range(WARMUP + 1, WARMUP + 2), together=2)
    spoil_branch(accelerator, model)
    optimizer.step()
    assert accelerator.optimizer_step_was_skipped
    optimizer.zero_grad()
    before = accelerator.traffic.sent()
    train(accelerator, model, optimizer, range(WARMUP + 2, STEPS), together=2)
    after = accelerator.traffic.sent()
    for key in [each for each in promised.sent if each[0] == "dp.far"]:
        assert (after[key] - before[key]) / (STEPS - WARMUP - 2) == promised.sent[key], key
    check_equal_groups(accelerator, model, optimizer)
    expected = whole(accelerator, model)
    exact = weights(reference(4, AdamW, width=WIDTH, together=2))
    apart = max(float((expected[name] - exact[name]).abs().max()) for name in exact)
    assert apart > LIMIT, "nothing was approximate"
    accelerator.free_memory()
    for exchange, name, far in (
        ("momentum", "fsdp", {}),
        ("momentum", "fsdp", {"gradients": "topk"}),
        ("gradients", "fsdp", {"gradients": "exact"}),
        ("momentum", "ddp", {}),
    ):
        accelerator = accelerator_of(exchange, name=name, far=far)
        model, optimizer = prepared(accelerator)
        accelerator.load_state(tmp_path)
        train(accelerator, model, optimizer, range(WARMUP + 1, STEPS), together=2)
        found = whole(accelerator, model)
        equal = all(torch.equal(found[each], expected[each]) for each in expected)
        assert equal is (exchange == "momentum" and name == "fsdp" and not far), (exchange, name)
        moved = max(float((found[each] - expected[each]).abs().max()) for each in expected)
        assert moved < FURTHEST, (exchange, name, far)
        accelerator.free_memory()


@pytest.mark.ranks(2)
def test_what_is_refused_on_every_rank(monkeypatch):
    """Models in bfloat16, one group over several hosts, other optimizers, closures and clipping."""
    spread(monkeypatch)
    accelerator = accelerator_of(dtypes={"master": "none"})
    model = Awkward(WIDTH).bfloat16()
    with pytest.raises(ConfigError, match="momenta and variances of fp32"):
        model, _ = accelerator.prepare(model, optimizer_of(model, AdamW))
        accelerator.backward(model(batch(0, 0)[0], branch=True))
    accelerator.free_memory()
    strategy = {"name": "fsdp", "sharding": "hybrid", "shard_size": 2, "exchange": "momentum"}
    links = {"far": {"gradients": "onebit", "warmup_steps": WARMUP}}
    accelerator = Accelerator(config={"strategy": strategy, "links": links}, cpu=True)
    with pytest.raises(ConfigError, match="a group of ranks on each host"):
        prepared(accelerator)
    accelerator = accelerator_of()
    check_other_optimizers(accelerator, Awkward(WIDTH))
    model, optimizer = prepared(accelerator)
    train(accelerator, model, optimizer, range(WARMUP + 1))
    tokens, branch = batch(0, 0)
    accelerator.backward(model(tokens, branch=branch))
    with pytest.raises(UsageError, match="no clipping by norm"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(UsageError, match="without a closure"):
        optimizer.step(lambda: 0.0)
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_early_ends_of_windows_and_one_host(monkeypatch):
    """A factor of 2 after the sum cancels out with the half of each loss, to the last bit.

    On one host Adam steps exactly.
    """
    monkeypatch.setenv("GROUP_RANK", "0")
    exact = []
    for exchange in ("momentum", "gradients"):
        accelerator = accelerator_of(exchange)
        model, optimizer = prepared(accelerator)
        train(accelerator, model, optimizer, range(STEPS), together=2)
        exact.append(whole(accelerator, model))
        accelerator.free_memory()
    spread(monkeypatch)
    found = []
    for window in (1, 2):
        accelerator = accelerator_of(window=window)
        model, optimizer = prepared(accelerator)
        loader = accelerator.prepare(DataLoader(range(2)))  # a batch for each rank
        for step, _ in ((step, each) for step in range(STEPS) for each in loader):
            with accelerator.accumulate(model):
                tokens, branch = batch(step, accelerator.process_index)
                accelerator.backward(model(tokens, branch=branch))
                optimizer.step()
                optimizer.zero_grad()
        found.append(whole(accelerator, model))
        accelerator.free_memory()
    for one, other in (exact, found):
        assert all(torch.equal(one[name], other[name]) for name in one)


def check_links(far, precision=PLAIN):
    config = FsdpConfig(sharding="hybrid", exchange="momentum")
    Fsdp.check_links(config, LinkMethods.configured(LinksConfig(far=far)), precision)


SIGNS = FarConfig(gradients="onebit", warmup_steps=9)


def test_options_that_do_not_go_together_are_refused():
    check_links(SIGNS)
    check_links(SIGNS, Precision(param=torch.bfloat16, reduce=torch.float32))
    momentum = functools.partial(FsdpConfig, exchange="momentum")
    stored = OffloadOptions(optimizer="cpu")
    for check, message in (
        (lambda: check_links(FarConfig(gradients="bf16", warmup_steps=9)), "a trajectory of its"),
        (lambda: check_links(FarConfig(gradients="auto", warmup_steps=9)), "a trajectory of its"),
        (lambda: check_links(FarConfig(gradients="onebit")), "warmup_steps of at least 1"),
        (lambda: check_links(SIGNS, Precision.of("fp16")), "fp16"),
        (lambda: check_links(SIGNS, Precision(param=torch.bfloat16)), "set dtypes.reduce: fp32"),
        (momentum().check, "only with sharding: hybrid"),
        (momentum(sharding="hybrid", offload=stored).check, "no store with exchange: momentum"),
    ):
        with pytest.raises(ConfigError, match=message):
            check()
