"""Every method for slow links under the strategies that send by channels: values, bytes, memory."""

import os
import time
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from drivetrain import Accelerator
from drivetrain.collectives.facts import gather_facts
from drivetrain.cost import ModelSpec
from drivetrain.errors import RankMismatchError
from drivetrain.facade import settings
from drivetrain.links.codec import SMALLEST
from drivetrain.registry import compressors, strategies
from drivetrain.strategy import find_strategy

WIDTH, ROWS, STEPS = 64, 8, 3

LIMITS = {"bf16": 0.01, "int8": 0.02, "int4": 0.3, "onebit": 1.5, "powersgd": 1.5, "topk": 1.5}
"""The largest difference of an update, in units of the largest update: a few roundings."""

FORMS = {"hybrid": {"sharding": "hybrid"}, "secondary": {"secondary": "host"}}
"""Options of a strategy by the word behind its name."""

CHANCE = {"rounding": "stochastic"}
FREE = {"rounding": "stochastic", "feedback": False}
"""Options of ``int8`` and ``int4``: rounding by chance, with errors that are kept, or without."""


def strategies_with(use: str) -> list[str]:
    """Return the installed strategies that send gradients, or parameters, by channels."""
    registry = strategies()
    found = []
    for name in registry.names:
        kind, options = find_strategy(name)
        if use in kind.channels(options):
            found.append(name)
    return found


def model() -> nn.Sequential:
    torch.manual_seed(3)
    layers = [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(WIDTH, 3))


def batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(ROWS, WIDTH, generator=generator)


def loss_of(each: nn.Module, inputs: Tensor) -> Tensor:
    return each(inputs).square().mean()


def alone(ranks: int, steps: int) -> nn.Sequential:
    """Train in one process on the batches of all ranks."""
    each = model()
    optimizer = SGD(each.parameters(), lr=0.5, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            (loss_of(each, batch(step, rank)) / ranks).backward()
        optimizer.step()
    return each


def accelerator_of(
    strategy: str,
    on_nonfinite: str = "stop",
    own: Mapping[str, object] | None = None,
    **far: object,
) -> Accelerator:
    name, _, form = strategy.partition(" ")
    options = FORMS[form] if form else own or {}
    config = {"strategy": {"name": name, **options}, "links": {"far": far}}
    config["on_nonfinite"] = on_nonfinite
    return Accelerator(config=config, cpu=True)


def trained(accelerator: Accelerator, steps: int) -> tuple[nn.Module, dict[str, Tensor]]:
    each = model()
    each, optimizer = accelerator.prepare(each, SGD(each.parameters(), lr=0.5, momentum=0.9))
    for step in range(steps):
        optimizer.zero_grad()
        accelerator.backward(loss_of(each, batch(step, accelerator.process_index)))
        optimizer.step()
    return each, {name: value.clone() for name, value in accelerator.get_state_dict(each).items()}


def check(
    strategy: str, ranks: int, options: Mapping[str, object] | None = None, **far: str
) -> dict[str, Tensor]:
    before, exact = model().state_dict(), alone(ranks, STEPS).state_dict()
    accelerator = accelerator_of(strategy, **far, options=options or {})
    assert accelerator.world.spans_hosts
    _, found = trained(accelerator, STEPS)
    accelerator.free_memory()
    limit = max(LIMITS[method] for method in far.values()) * (2 if options else 1)
    difference = 0.0
    for name, value in found.items():
        update = (exact[name] - before[name]).abs().max()
        apart = (value - exact[name]).abs().max()
        assert apart < limit * update, f"{name}: {apart / update:.4f} of an update apart"
        difference = max(difference, float(apart / update))
    assert difference > 1e-5, "nothing was approximate"
    return found


def check_costs(strategy: str, **far: object) -> None:
    accelerator = accelerator_of(strategy, **far)
    each, _ = trained(accelerator, 2)
    run, kind = accelerator.strategy_of(each).run, type(accelerator.strategy_of(each))
    spec = ModelSpec.of(model(), states=1)
    promised = kind.cost(accelerator.strategy_of(each).config, spec, run)
    optimizer = accelerator._prepared.optimizers[0]
    before = accelerator.traffic.sent()
    for step in range(2, 4):
        optimizer.zero_grad()
        accelerator.backward(loss_of(each, batch(step, accelerator.process_index)))
        optimizer.step()
    after = accelerator.traffic.sent()
    if accelerator.is_main_process:
        sent = {key: (after[key] - before.get(key, 0)) / 2 for key in after}
        assert {key: count for key, count in sent.items() if count} == promised.sent
    accelerator.free_memory()


def host_of_each_rank(monkeypatch: pytest.MonkeyPatch, per_host: int) -> None:
    """Let ranks believe in hosts: a host's name has torchrun's number of the host as a part."""
    monkeypatch.setenv("GROUP_RANK", str(int(os.environ["RANK"]) // per_host))


@pytest.mark.ranks(2)
def test_gradients_over_two_hosts(monkeypatch):
    host_of_each_rank(monkeypatch, 1)
    assert set(compressors().names) >= LIMITS.keys()
    pairs = [("ddp", method) for method in LIMITS]
    pairs += [
        ("fsdp secondary", "int4"),
        ("fsdp", "int8"),
        ("zero1", "bf16"),
        ("zero2", "topk"),
        ("zero3", "powersgd"),
    ]
    for strategy, method in [*pairs, ("zero2", "onebit")]:
        check(strategy, 2, gradients=method)
        check_costs(strategy, gradients=method)


@pytest.mark.ranks(2)
def test_gradients_rounded_by_chance_over_two_hosts(monkeypatch):
    host_of_each_rank(monkeypatch, 1)
    for strategy, method, options in (
        ("ddp", "int8", FREE),
        ("zero2", "int4", FREE),
        ("zero3", "int4", CHANCE),
        ("fsdp", "int8", FREE),
    ):
        found, again = (check(strategy, 2, options, gradients=method) for _ in range(2))
        assert all(torch.equal(value, again[name]) for name, value in found.items())
        check_costs(strategy, gradients=method, options=options)


@pytest.mark.ranks(2)
def test_the_cost_without_feedback_holds_no_errors(monkeypatch):
    host_of_each_rank(monkeypatch, 1)
    held = []
    for options in ({}, FREE):
        accelerator = accelerator_of("ddp", gradients="int8", options=options)
        each, _ = trained(accelerator, 1)
        strategy = accelerator.strategy_of(each)
        cost = type(strategy).cost(strategy.config, ModelSpec.of(model(), states=1), strategy.run)
        sizes = [each.nbytes for each in link_state(accelerator, each).values()]
        held.append((sum(cost.held.values()), sum(sizes)))
        accelerator.free_memory()
    (kept, _), (free, counts) = held
    matrices = 2 * WIDTH * WIDTH
    assert kept - free == 4 * matrices - 8 * 3  # one of the matrices is cut between the ranks
    assert counts in (0, 8 * 3)  # saved by one host


@pytest.mark.exhaustive
@pytest.mark.ranks(2, timeout=900)
def test_every_method_under_every_strategy(monkeypatch):
    host_of_each_rank(monkeypatch, 1)
    for strategy in strategies_with("gradients"):
        for method in LIMITS:
            check(strategy, 2, gradients=method)
            check_costs(strategy, gradients=method)
        for options in (CHANCE, FREE):
            check(strategy, 2, options, gradients="int4")
            check_costs(strategy, gradients="int4", options=options)


@pytest.mark.ranks(4)
def test_gradients_over_two_hosts_with_two_ranks_each(monkeypatch):
    host_of_each_rank(monkeypatch, 2)
    pairs = [("ddp", "int8"), ("fsdp hybrid", "powersgd"), ("zero2", "int8"), ("zero3", "int4")]
    for strategy, method in pairs:
        check(strategy, 4, gradients=method)
        check_costs(strategy, gradients=method)
    found, again = (check("ddp", 4, gradients="int8") for _ in range(2))
    assert all(torch.equal(value, again[name]) for name, value in found.items())


@pytest.mark.ranks(2)
def test_parameters_over_two_hosts(monkeypatch):
    host_of_each_rank(monkeypatch, 1)
    pairs = [("zero1", "int8"), ("zero2", "topk"), ("zero2", "int4"), ("zero3", "int8")]
    for strategy, method in [*pairs, ("fsdp", "bf16"), ("zero3", "bf16"), ("offload", "int8")]:
        check(strategy, 2, parameters=method)
        check_costs(strategy, parameters=method)
    for strategy in ("zero2", "fsdp secondary", "zero3 secondary"):
        check(strategy, 2, gradients="powersgd", parameters="topk")
        check_costs(strategy, gradients="powersgd", parameters="powersgd")


@pytest.mark.ranks(4)
def test_parameters_over_two_hosts_with_two_ranks_each(monkeypatch):
    host_of_each_rank(monkeypatch, 2)
    pairs = [("zero2", "int8"), ("fsdp", "int8"), ("zero3", "int8")]
    for strategy, method in [*pairs, ("fsdp secondary", "powersgd"), ("fsdp secondary", "int4")]:
        check(strategy, 4, parameters=method)
        check_costs(strategy, parameters=method)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_what_a_script_reads_and_saves_of_approximate_parameters_is_exact(monkeypatch, strategy):
    host_of_each_rank(monkeypatch, 1)
    accelerator = accelerator_of(strategy, parameters="int8")
    each, found = trained(accelerator, 2)
    shards = {}
    for shard in accelerator.strategy_of(each).shards():
        if not shard.state:
            shards.setdefault(shard.name, []).append(shard)
    assert shards
    for name, pieces in shards.items():
        for shard in pieces:
            start, stop = shard.part.range
            flat = found[name].reshape(-1)[start:stop]
            assert torch.equal(flat, shard.tensor.reshape(-1)), name
    # Every rank steps on from the same values.
    inputs = batch(9, 0)
    outputs = accelerator.gather(each(inputs).detach()[None])
    assert torch.equal(outputs[0], outputs[1])
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_a_checkpoint_goes_on_bit_for_bit_and_under_another_method(monkeypatch, tmp_path):
    host_of_each_rank(monkeypatch, 1)
    pairs = [("ddp", "int4"), ("ddp", "powersgd"), ("zero2", "int4"), ("fsdp hybrid", "topk")]
    for strategy, method in pairs:
        place = tmp_path / f"{strategy} {method}"
        accelerator = accelerator_of(strategy, gradients=method)
        each, _ = trained(accelerator, 2)
        accelerator.save_state(place)
        kept = summed_errors(accelerator, each)
        assert all(errors.abs().max() > 0 for errors in kept.values())
        expected = one_step(accelerator, each)
        accelerator.free_memory()
        for now in (method, "int8"):
            accelerator = accelerator_of(strategy, gradients=now)
            each, _ = trained(accelerator, 0)
            accelerator.load_state(place)
            if "powersgd" not in (method, now):  # which has no errors where a row is cut
                for name, errors in summed_errors(accelerator, each).items():
                    torch.testing.assert_close(errors, kept[name], rtol=0, atol=1e-6)
            found = one_step(accelerator, each)
            equal = all(torch.equal(found[name], expected[name]) for name in expected)
            assert equal is (now == method), f"{strategy}, {method} and then {now}"
            accelerator.free_memory()


@pytest.mark.ranks(2)
def test_a_checkpoint_of_draws_goes_on_bit_for_bit_and_under_another_method(monkeypatch, tmp_path):
    host_of_each_rank(monkeypatch, 1)
    for strategy, method, options in (
        ("ddp", "int4", FREE),
        ("zero2", "int8", CHANCE),
        ("fsdp hybrid", "int4", FREE),
    ):
        place = tmp_path / f"{strategy} {method}"
        accelerator = accelerator_of(strategy, gradients=method, options=options)
        each, _ = trained(accelerator, 2)
        accelerator.save_state(place)
        kept = summed_errors(accelerator, each)
        assert all(bool(errors.abs().max() > 0) is (options == CHANCE) for errors in kept.values())
        expected = one_step(accelerator, each)
        accelerator.free_memory()
        for now, chance in ((method, options), ("int8", {}), ("onebit", {}), ("powersgd", {})):
            accelerator = accelerator_of(strategy, gradients=now, options=chance)
            each, _ = trained(accelerator, 0)
            accelerator.load_state(place)
            if now != "powersgd":  # which has no errors where a row is cut
                for name, errors in summed_errors(accelerator, each).items():
                    torch.testing.assert_close(errors, kept[name], rtol=0, atol=1e-6)
            found = one_step(accelerator, each)
            equal = all(torch.equal(found[name], expected[name]) for name in expected)
            assert equal is bool(chance), f"{strategy}, {method} and then {now}"
            assert all(value.isfinite().all() for value in found.values())
            accelerator.free_memory()


def summed_errors(accelerator: Accelerator, each: nn.Module) -> dict[str, Tensor]:
    """Return the sum over ranks of the errors of each large matrix."""
    shards = list(accelerator.strategy_of(each).shards())
    found = {}
    for name, parameter in model().named_parameters():
        if parameter.dim() < 2 or parameter.numel() < SMALLEST:
            continue
        errors = torch.zeros(parameter.numel())
        for shard in shards:
            if shard.name == name and shard.state.startswith("links.error."):
                first = int(shard.state.rpartition(".")[2])
                errors[first : first + shard.tensor.numel()] += shard.tensor
        found[name] = accelerator.reduce(errors, "sum")
    return found


def link_state(accelerator: Accelerator, each: nn.Module) -> dict[tuple[str, str], Tensor]:
    """Return copies of what sums between hosts keep on this rank."""
    shards = accelerator.strategy_of(each).shards()
    return {(s.name, s.state): s.tensor.clone() for s in shards if s.state.startswith("links.")}


@pytest.mark.ranks(2)
def test_a_nan_in_one_bias_of_one_rank_leaves_all_errors_as_they_were(monkeypatch):
    host_of_each_rank(monkeypatch, 1)
    for strategy, options in (
        ("ddp", {"bucket_mib": 0.02, "first_bucket_mib": 0.02}),
        ("zero2", {"bucket_mib": 0.02}),
    ):
        accelerator = accelerator_of(strategy, "skip", options, gradients="int8")
        each, _ = trained(accelerator, 3)
        before = link_state(accelerator, each)
        assert before
        (optimizer,) = accelerator._prepared.optimizers
        bad = float("nan") if accelerator.process_index else 1.0
        hook = each[0].bias.register_hook(lambda grad, bad=bad: grad * bad)
        optimizer.zero_grad()
        accelerator.backward(loss_of(each, batch(5, 0)))
        assert list(accelerator.strategy_of(each).gradients())
        during = link_state(accelerator, each)
        assert not all(torch.equal(during[key], before[key]) for key in before), strategy
        optimizer.step()
        assert accelerator.optimizer_step_was_skipped
        after = link_state(accelerator, each)
        assert after.keys() == before.keys()
        assert all(torch.equal(value, before[key]) for key, value in after.items()), strategy
        hook.remove()
        assert all(v.isfinite().all() for v in one_step(accelerator, each).values())
        accelerator.free_memory()


@pytest.mark.ranks(2)
def test_ranks_with_different_methods_or_options_get_one_error(monkeypatch):
    host_of_each_rank(monkeypatch, 1)
    rank = int(os.environ["RANK"])
    for far, key, values in (
        ({"gradients": ("int8", "int4")[rank]}, "gradients", ("int8", "int4")),
        ({"gradients": "int8", "options": {"block": (64, 128)[rank]}}, "options", (64, 128)),
        ({"gradients": "int8", "warmup_steps": rank}, "warmup_steps", (0, 1)),
    ):
        with pytest.raises(RankMismatchError, match="disagree on the configuration") as caught:
            trained(accelerator_of("ddp", **far), 1)
        mine, theirs = str(caught.value).split("rank 1 has")
        assert f"links.far.{key}" in mine
        assert str(values[0]) in mine
        assert f"links.far.{key}" in theirs
        assert str(values[1]) in theirs


def one_step(accelerator: Accelerator, each: nn.Module) -> dict[str, Tensor]:
    (optimizer,) = accelerator._prepared.optimizers
    optimizer.zero_grad()
    accelerator.backward(loss_of(each, batch(7, accelerator.process_index)))
    optimizer.step()
    return {name: value.clone() for name, value in accelerator.get_state_dict(each).items()}


@pytest.mark.ranks(2)
def test_a_step_with_nan_is_skipped_everywhere_and_later_steps_do_not_miss_errors(monkeypatch):
    host_of_each_rank(monkeypatch, 1)
    pairs = [("ddp", "int4"), ("zero2", "powersgd"), ("zero3", "int4"), ("fsdp hybrid", "topk")]
    for strategy, method in pairs:
        parameters = {"zero2": "powersgd", "zero3": "int8"}.get(strategy, "exact")
        found = []
        for bad in (False, True):
            accelerator = accelerator_of(strategy, "skip", gradients=method, parameters=parameters)
            each, _ = trained(accelerator, 2)
            if bad:
                (optimizer,) = accelerator._prepared.optimizers
                factor = float("nan") if accelerator.process_index else 1.0
                accelerator.backward(factor * loss_of(each, batch(5, accelerator.process_index)))
                optimizer.step()
                assert accelerator.optimizer_step_was_skipped
                optimizer.zero_grad()
            found.append(one_step(accelerator, each))
            accelerator.free_memory()
        good, after = found
        for name, value in after.items():
            assert torch.equal(value, good[name]), f"{strategy}, {method}: {name}"


@pytest.mark.exhaustive
@pytest.mark.ranks(2, timeout=900)
@pytest.mark.parametrize("parameters", ["bf16", "int8", "int4", "topk", "powersgd"])
def test_every_method_for_parameters_under_every_strategy(monkeypatch, parameters):
    host_of_each_rank(monkeypatch, 1)
    plain = {*strategies_with("parameters"), *strategies_with("updates")}
    for strategy in [*plain, "fsdp secondary"]:
        name, _, form = strategy.partition(" ")
        kind, options = find_strategy(name)
        options = kind.Config(**FORMS[form]) if form else options
        method = compressors().load(parameters)
        values = "parameters" in kind.channels(options)
        if method.parameters if values else method.updates:
            check(strategy, 2, parameters=parameters)
            check_costs(strategy, parameters=parameters)


@pytest.mark.exhaustive
@pytest.mark.ranks(4, timeout=900)
@pytest.mark.parametrize("method", sorted(LIMITS))
def test_every_method_over_two_hosts_with_two_ranks_each(monkeypatch, method):
    host_of_each_rank(monkeypatch, 2)
    for strategy in [*strategies_with("gradients"), "fsdp hybrid"]:
        check(strategy, 4, gradients=method)


@pytest.mark.ranks(2)
def test_auto_chooses_within_what_is_allowed_and_costs_count_its_bytes(monkeypatch):
    host_of_each_rank(monkeypatch, 1)
    expected = [
        ("ddp", "theory", 1.0, ("topk", "exact")),
        ("ddp", "rounding", 1.0, ("bf16", "exact")),
        ("ddp", "theory", 1e9, ("exact", "exact")),
        ("zero2", "rounding", 1.0, ("bf16", "bf16")),
        ("zero3", "rounding", 1.0, ("bf16", "bf16")),
        ("zero3", "exact", 1.0, ("exact", "exact")),
        ("plain", "theory", 1.0, ("exact", "exact")),
    ]
    said: list[str] = []
    monkeypatch.setattr(settings.logger, "announce", said.append)
    for strategy, allow, rate, names in expected:
        accelerator = automatic(strategy, allow, rate)
        each, _ = trained(accelerator, 1)
        held = accelerator.strategy_of(each)
        assert held.run.links.names == names, f"{strategy}, {allow}, {rate}"
        assert held.run.links.auto is None
        check_sent(accelerator, each)
        accelerator.free_memory()
    begin = "between hosts, auto, rounding at most, 0.125 MB/s as links.mbit_per_s says: gradients "
    lines = [line for line in said if line.startswith(begin)]
    assert len(lines) == 3
    assert all("bf16 (rounding), for 2 of 8 parameters (8,192 numbers)" in line for line in lines)


@pytest.mark.ranks(2)
def test_auto_measures_the_link_that_nobody_has_declared(monkeypatch):
    host_of_each_rank(monkeypatch, 1)
    said: list[str] = []
    monkeypatch.setattr(settings.logger, "announce", said.append)
    accelerator = automatic("ddp", "theory", 0.0)
    each, _ = trained(accelerator, 1)
    assert accelerator.strategy_of(each).run.links.auto is None
    (line,) = [line for line in said if "MB/s measured now: gradients" in line]
    # All ranks, whatever each of them has measured, have chosen the same for the same reason.
    assert len(set(gather_facts(line, str, doing="the lines of all ranks"))) == 1
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_auto_leaves_tensors_exact_for_which_a_method_does_not_pay(monkeypatch):
    host_of_each_rank(monkeypatch, 1)
    monkeypatch.setitem(globals(), "model", lopsided)
    said: list[str] = []
    monkeypatch.setattr(settings.logger, "announce", said.append)
    # bf16 saves 0.26 s of the large matrix at 1 Mbit/s, 0.07 s of the small one.
    monkeypatch.setattr(compressors().load("bf16"), "rehearse", lambda *_: time.sleep(0.12))
    accelerator = automatic("ddp", "rounding", 1.0)
    each, _ = trained(accelerator, 1)
    sent = check_sent(accelerator, each)
    accelerator.free_memory()
    accelerator = accelerator_of("ddp", gradients="bf16")
    each, _ = trained(accelerator, 1)
    all_encoded = check_sent(accelerator, each)
    accelerator.free_memory()
    said_of = "gradients bf16 (rounding), for 1 of 4 parameters (16,384 numbers)"
    assert any(said_of in line for line in said)
    if int(os.environ["RANK"]) == 0:
        # Rank 0 sends the small matrix to rank 1, which sums it, with 4 bytes a number, not 2.
        more = {key: sent[key] - all_encoded[key] for key in sent if sent[key] != all_encoded[key]}
        assert more == {("dp.far", "all_to_all"): 2 * WIDTH * WIDTH}


def lopsided() -> nn.Sequential:
    """Return a model of a small and a large matrix."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4 * WIDTH))


def automatic(strategy: str, allow: str, mbit_per_s: float) -> Accelerator:
    links = {"far": "auto", "allow": allow, "mbit_per_s": mbit_per_s, "backward_s": 1e-9}
    return Accelerator(config={"strategy": strategy, "links": links}, cpu=True)


def check_sent(accelerator: Accelerator, each: nn.Module) -> Mapping[tuple[str, str], int]:
    """Compare the bytes of a step with the promise; return the promise."""
    held = accelerator.strategy_of(each)
    promised = type(held).cost(held.config, ModelSpec.of(model(), states=1), held.run).sent
    before = accelerator.traffic.sent()
    (optimizer,) = accelerator._prepared.optimizers
    optimizer.zero_grad()
    accelerator.backward(loss_of(each, batch(7, accelerator.process_index)))
    optimizer.step()
    after = accelerator.traffic.sent()
    if accelerator.is_main_process:
        sent = {key: count - before.get(key, 0) for key, count in after.items()}
        assert {key: count for key, count in sent.items() if count} == promised
    return promised
