"""1-bit Adam under ddp, and between groups of hybrid sharding: the algorithm, and its limits."""

import functools

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW
from torch.utils.data import DataLoader

from drivetrain import Accelerator
from drivetrain.compression.methods import LinkMethods
from drivetrain.config.schema import FarConfig, LinksConfig
from drivetrain.cost import ModelSpec
from drivetrain.errors import ConfigError, UsageError
from drivetrain.parallel.options import OffloadOptions
from drivetrain.runtime.precision import Precision
from drivetrain_ddp.options import DdpConfig
from drivetrain_ddp.strategy import Ddp
from drivetrain_fsdp.fsdp import Fsdp
from drivetrain_fsdp.options import FsdpConfig
from one_bit_steps import (
    LIMIT,
    STEPS,
    WARMUP,
    awkward,
    batch,
    check_other_optimizers,
    lose_nothing,
    optimizer_of,
    reference,
    spoil_branch,
    spread,
    weights,
)

pytestmark = pytest.mark.ranks(2)

FORMS = {
    "ddp": {"name": "ddp", "bucket_mib": 0.02, "first_bucket_mib": 0.02},
    "fsdp": {"name": "fsdp", "sharding": "hybrid", "unit_from": 1000},
}
WIDTHS = {"ddp": 48, "fsdp": 96}
"""So that half of a matrix under fsdp has the 2,048 elements from which a method takes it."""

FURTHEST = 2 * sum(0.01 / (1 + step) for step in range(WARMUP + 1, STEPS)) / 0.001**0.5 / 10
"""How far two runs come apart after a checkpoint, by Adam's own bound of a step."""

ONE_BUCKET = {"bucket_mib": 25, "first_bucket_mib": 25}

EACH = pytest.mark.parametrize("name", FORMS)


def accelerator_of(name="ddp", exchange="momentum", *, window=1, form=(), far=(), **options):
    far = {"gradients": "onebit", "warmup_steps": WARMUP, **dict(far)}
    strategy = {**FORMS[name], "exchange": exchange, **dict(form)}
    return Accelerator(
        config={"strategy": strategy, "links": {"far": far}, **options},
        cpu=True,
        gradient_accumulation_steps=window,
    )


def prepared(accelerator, kind=AdamW, width=WIDTHS["ddp"]):
    model = awkward(width)
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
    with accelerator.strategy_of(model).state.gathered(model.parameters(), modify=False):
        return weights(model)


def check_equal_groups(accelerator, model, optimizer):
    """Ranks with the same rows have the same bits of them, and of their states."""
    ranks = accelerator.strategy_of(model).ranks
    replicas = getattr(ranks, "replicas", ranks)
    inner = optimizer.optimizer
    held = [each for group in inner.param_groups for each in group["params"]]
    for fragment in held:
        for value in (fragment.detach(), *inner.state.get(fragment, {}).values()):
            highest, lowest = value.clone(), -value
            replicas.all_reduce(highest, reduction="max", label="values of all groups").wait()
            replicas.all_reduce(lowest, reduction="max", label="values of all groups").wait()
            assert torch.equal(highest, value)
            assert torch.equal(-lowest, value)


@pytest.mark.parametrize(
    ("name", "per_host", "kinds", "together", "window"),
    [
        pytest.param("ddp", 1, (Adam, AdamW), 1, 1, marks=pytest.mark.ranks(2), id="ddp-2"),
        pytest.param("ddp", 2, (Adam, AdamW), 1, 1, marks=pytest.mark.ranks(4), id="ddp-4"),
        pytest.param("fsdp", 1, (Adam, AdamW), 1, 1, marks=pytest.mark.ranks(2), id="fsdp-2"),
        pytest.param("fsdp", 2, (AdamW,), 2, 2, marks=pytest.mark.ranks(4), id="fsdp-windows-4"),
    ],
)
def test_with_an_exact_method_training_is_the_algorithm_in_one_process(
    monkeypatch, name, per_host, kinds, together, window
):
    """Over two hosts, with one rank or two ranks each."""
    spread(monkeypatch, per_host)
    times = {"together": together, "window": window}
    for kind in kinds:
        accelerator = accelerator_of(name, window=window)
        model, optimizer = prepared(accelerator, kind, WIDTHS[name])
        with monkeypatch.context() as patch:
            lose_nothing(patch, accelerator.strategy_of(model).run.links.gradients)
            train(accelerator, model, optimizer, range(STEPS), **times)
        found = whole(accelerator, model)
        expected = reference(2 * per_host, kind, width=WIDTHS[name], **times)
        for key, value in weights(expected).items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=LIMIT, msg=key)
        check_equal_groups(accelerator, model, optimizer)


OTHERS = {
    "ddp": (("ddp", "gradients", {"gradients": "exact"}), ("fsdp", "momentum", {})),
    "fsdp": (
        ("fsdp", "momentum", {"gradients": "topk"}),
        ("fsdp", "gradients", {"gradients": "exact"}),
        ("ddp", "momentum", {}),
    ),
}
"""With what else a checkpoint of a strategy is loaded."""


@pytest.mark.parametrize(
    ("name", "per_host", "form"),
    [
        # Of one bucket the order is the promised one.
        pytest.param("ddp", 1, ONE_BUCKET, marks=pytest.mark.ranks(2)),
        pytest.param("fsdp", 2, {}, marks=pytest.mark.ranks(4)),
    ],
)
def test_with_signs_ranks_stay_equal_bytes_are_as_promised_and_a_checkpoint_goes_on(
    monkeypatch, tmp_path, name, per_host, form
):
    """A step that is not finite leaves momenta and errors as they were: a run without is equal.

    On one host a checkpoint goes on with exact steps.
    """

    def go_on(accelerator, steps, together=per_host):
        train(accelerator, model, optimizer, steps, together=together)

    def loaded(name, exchange, far):
        accelerator = accelerator_of(name, exchange, far=far, form=form if name == "ddp" else ())
        return accelerator, *prepared(accelerator, width=width)

    spread(monkeypatch, per_host)
    width = WIDTHS[name]
    accelerator = accelerator_of(name, form=form, on_nonfinite="skip")
    model, optimizer = prepared(accelerator, width=width)
    go_on(accelerator, range(WARMUP + 1))
    accelerator.save_state(tmp_path)
    strategy = accelerator.strategy_of(model)
    spec = ModelSpec.of(model if name == "fsdp" else awkward(width), states=2)
    promised = type(strategy).cost(strategy.config, spec, strategy.run).sent
    go_on(accelerator, range(WARMUP + 1, WARMUP + 2))
    spoil_branch(accelerator, model)
    optimizer.step()
    assert accelerator.optimizer_step_was_skipped
    optimizer.zero_grad()
    accelerator.traffic.clear()
    go_on(accelerator, range(WARMUP + 2, STEPS))
    counts = accelerator.traffic.sent().items()
    sent = {key: count / (STEPS - WARMUP - 2) for key, count in counts}
    if name == "fsdp":
        for key in [each for each in promised if each[0] == "dp.far"]:
            assert sent[key] == promised[key], key
    elif accelerator.is_main_process:
        assert {key: count for key, count in sent.items() if count} == promised
    check_equal_groups(accelerator, model, optimizer)
    expected = whole(accelerator, model)
    exact = weights(reference(2 * per_host, AdamW, width=width, together=per_host))
    apart = max(float((expected[key] - exact[key]).abs().max()) for key in exact)
    assert apart > LIMIT, "nothing was approximate"
    # No batch uses these rows.
    assert not torch.equal(expected["table.weight"][-9:], awkward(width).table.weight[-9:])
    for way in ((name, "momentum", {}), *OTHERS[name]):
        accelerator, model, optimizer = loaded(*way)
        accelerator.load_state(tmp_path)
        go_on(accelerator, range(WARMUP + 1, STEPS))
        found = whole(accelerator, model)
        equal = all(torch.equal(found[key], expected[key]) for key in expected)
        assert equal is (way == (name, "momentum", {})), way
        moved = max(float((found[key] - expected[key]).abs().max()) for key in expected)
        assert moved < FURTHEST, way
    monkeypatch.setenv("GROUP_RANK", "0")
    found = []
    for exchange, far in (("momentum", {}), ("gradients", {"gradients": "exact"})):
        accelerator, model, optimizer = loaded(name, exchange, far)
        accelerator.load_state(tmp_path)
        # All ranks of a group take the same way, and under fsdp this is one group.
        go_on(accelerator, range(WARMUP + 1, STEPS), 4 if name == "fsdp" else 1)
        found.append(whole(accelerator, model))
    assert all(torch.equal(found[0][key], found[1][key]) for key in expected)


def test_a_step_that_is_not_finite_leaves_momenta_and_errors_of_several_buckets(monkeypatch):
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
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


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
    for shard in strategy.state.shards():
        if shard.name == "inner.weight" and shard.state.startswith("links.error."):
            first = int(shard.state.rpartition(".")[2])
            kept[first : first + shard.tensor.numel()] += shard.tensor
    kept = accelerator.reduce(kept, "sum").view_as(parameter)
    assert kept.abs().max() > 1e-4 * due.abs().max()
    torch.testing.assert_close(crossed + kept, due, rtol=0, atol=1e-6)


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


@EACH
def test_other_optimizers_closures_and_clipping_are_refused_on_every_rank(monkeypatch, name):
    spread(monkeypatch)
    accelerator = accelerator_of(name)
    check_other_optimizers(accelerator, awkward(WIDTHS[name]))
    model, optimizer = prepared(accelerator, width=WIDTHS[name])
    train(accelerator, model, optimizer, range(WARMUP + 1))
    tokens, branch = batch(0, 0)
    accelerator.backward(model(tokens, branch=branch))
    with pytest.raises(UsageError, match="no clipping by norm"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(UsageError, match="without a closure"):
        optimizer.step(lambda: 0.0)


def test_models_in_bfloat16_and_one_group_over_several_hosts_are_refused_under_fsdp(monkeypatch):
    spread(monkeypatch)
    accelerator = accelerator_of("fsdp", dtypes={"master": "none"})
    model = awkward(WIDTHS["fsdp"]).bfloat16()
    with pytest.raises(ConfigError, match="momenta and variances of fp32"):
        model, _ = accelerator.prepare(model, optimizer_of(model, AdamW))
        accelerator.backward(model(batch(0, 0)[0], branch=True))
    accelerator = accelerator_of("fsdp", form={"shard_size": 2})
    with pytest.raises(ConfigError, match="a group of ranks on each host"):
        prepared(accelerator)


def test_early_ends_of_windows_and_one_host_under_fsdp(monkeypatch):
    """A factor of 2 after the sum cancels out with the half of each loss, to the last bit.

    On one host Adam steps exactly.
    """
    monkeypatch.setenv("GROUP_RANK", "0")
    exact = []
    for exchange in ("momentum", "gradients"):
        accelerator = accelerator_of("fsdp", exchange)
        model, optimizer = prepared(accelerator, width=WIDTHS["fsdp"])
        train(accelerator, model, optimizer, range(STEPS), together=2)
        exact.append(whole(accelerator, model))
    spread(monkeypatch)
    found = []
    for window in (1, 2):
        accelerator = accelerator_of("fsdp", window=window)
        model, optimizer = prepared(accelerator, width=WIDTHS["fsdp"])
        loader = accelerator.prepare(DataLoader(range(2)))  # a batch for each rank
        for step, _ in ((step, each) for step in range(STEPS) for each in loader):
            with accelerator.accumulate(model):
                tokens, branch = batch(step, accelerator.process_index)
                accelerator.backward(model(tokens, branch=branch))
                optimizer.step()
                optimizer.zero_grad()
        found.append(whole(accelerator, model))
    for one, other in (exact, found):
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_ranks_without_batches_have_no_momenta_for_the_others(monkeypatch):
    spread(monkeypatch)
    accelerator = accelerator_of()
    model, optimizer = prepared(accelerator)
    refused = pytest.raises(UsageError, match="Ddp cannot stand in")
    with refused, accelerator.join_uneven_inputs([model]):
        train(accelerator, model, optimizer, range(1 + accelerator.process_index))


def check_links(name, gradients="onebit", precision="no", *, warmup=9, **options):
    """Check options as a strategy does before it starts."""
    if not isinstance(precision, Precision):
        precision = Precision.of(precision)
    links = LinksConfig(far=FarConfig(gradients=gradients, warmup_steps=warmup))
    config = DdpConfig(exchange="momentum", **options)
    if name == "fsdp":
        config = FsdpConfig(sharding="hybrid", exchange="momentum")
    else:
        Ddp.check_options(config, precision)
    kind = {"ddp": Ddp, "fsdp": Fsdp}[name]
    kind.check_links(config, LinkMethods.configured(links), precision)


@EACH
@pytest.mark.ranks(1)
def test_options_that_do_not_go_together_are_refused(name):
    check = functools.partial(check_links, name)
    check()
    for method in ("exact", "bf16", "auto"):
        with pytest.raises(ConfigError, match="a method with a trajectory of its own"):
            check(method)
    with pytest.raises(ConfigError, match="warmup_steps of at least 1"):
        check(warmup=0)
    with pytest.raises(ConfigError, match="fp16"):
        check(precision="fp16")


@pytest.mark.ranks(1)
def test_options_that_one_strategy_alone_refuses():
    check_links("fsdp", precision=Precision(param="bf16", reduce="fp32"))
    low = Precision(param="bf16")
    momentum = functools.partial(FsdpConfig, exchange="momentum")
    stored = OffloadOptions(optimizer="cpu")
    for check, message in (
        (lambda: check_links("ddp", hook="bf16"), "hook: none"),
        (lambda: check_links("fsdp", precision=low), "set dtypes.reduce: fp32"),
        (momentum().check, "only with sharding: hybrid"),
        (momentum(sharding="hybrid", offload=stored).check, "no store with exchange: momentum"),
    ):
        with pytest.raises(ConfigError, match=message):
            check()
