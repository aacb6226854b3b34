"""Every method for slow links under the strategies that send by channels: values, bytes, memory."""

import functools
import time
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from drivetrain.collectives.facts import gather_facts
from drivetrain.compression.compressor import SMALLEST
from drivetrain.errors import RankMismatchError
from drivetrain.facade import prepared
from drivetrain.registry import compressors, strategies
from drivetrain.strategy import find_strategy
from linked_trainings import FORMS, WIDTH, Training, batch, model_of, same, sgd, spread
from stacks import Parts

pytestmark = pytest.mark.ranks(2)

STEPS = 3

LIMITS = {"bf16": 0.01, "int8": 0.02, "int4": 0.3, "onebit": 1.5, "powersgd": 1.5, "topk": 1.5}
"""The largest difference of an update, in units of the largest update: a few roundings."""

CHANCE = {"rounding": "stochastic"}
FREE = {"rounding": "stochastic", "feedback": False}
"""Options of ``int8`` and ``int4``: rounding by chance, with errors that are kept, or without."""


@functools.cache
def alone(ranks: int) -> Mapping[str, Tensor]:
    """Train in one process on the batches of all ranks."""
    model = model_of()
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(ranks):
            (model(batch(step, rank)).square().mean() / ranks).backward()
        optimizer.step()
    return model.state_dict()


def check(
    form: str, options: Mapping[str, object] | None = None, **far: str
) -> Mapping[str, Tensor]:
    """Compare steps with those of one process, and the bytes of further ones with the promise."""
    training = Training(form, far={**far, "options": options or {}})
    world = training.accelerator.world
    assert world.spans_hosts
    before, exact = model_of().state_dict(), alone(world.size)
    found = training.train(STEPS).state()
    limit = max(LIMITS[method] for method in far.values()) * (2 if options else 1)
    apart = {
        name: float((value - exact[name]).abs().max() / (exact[name] - before[name]).abs().max())
        for name, value in found.items()
    }
    assert max(apart.values()) < limit, (form, far, apart)
    assert max(apart.values()) > 1e-5, f"{form}, {far}: nothing was approximate"
    training.check_sent()
    training.end()
    return found


def test_gradients_over_two_hosts(monkeypatch):
    spread(monkeypatch)
    assert set(compressors().names) >= LIMITS.keys()
    for method in LIMITS:
        check("ddp", gradients=method)
    check("fsdp secondary", gradients="int4")
    check("fsdp", gradients="int8")
    check("zero1", gradients="bf16")
    check("zero2", gradients="topk")
    check("zero2", gradients="onebit")
    check("zero3", gradients="powersgd")


def test_gradients_rounded_by_chance_over_two_hosts(monkeypatch):
    spread(monkeypatch)
    for form, method, options in (
        ("ddp", "int8", FREE),
        ("zero2", "int4", FREE),
        ("zero3", "int4", CHANCE),
        ("fsdp", "int8", FREE),
    ):
        found, again = (check(form, options, gradients=method) for _ in range(2))
        assert same(found, again), form


def test_the_cost_without_feedback_holds_no_errors(monkeypatch):
    spread(monkeypatch)
    held = []
    for options in ({}, FREE):
        training = Training("ddp", far={"gradients": "int8", "options": options}).train()
        strategy = training.strategy
        cost = type(strategy).cost(strategy.config, training.spec, strategy.run)
        sizes = [each.nbytes for each in link_state(training).values()]
        held.append((sum(cost.held.values()), sum(sizes)))
        training.end()
    (kept, _), (free, counts) = held
    matrices = 2 * WIDTH * WIDTH
    assert kept - free == 4 * matrices - 8 * 3  # one of the matrices is cut between the ranks
    assert counts in (0, 8 * 3)  # saved by one host


@pytest.mark.ranks(4)
def test_gradients_over_two_hosts_with_two_ranks_each(monkeypatch):
    spread(monkeypatch, 2)
    check("fsdp hybrid", gradients="powersgd")
    check("zero2", gradients="int8")
    check("zero3", gradients="int4")
    found, again = (check("ddp", gradients="int8") for _ in range(2))
    assert same(found, again)


def test_parameters_over_two_hosts(monkeypatch):
    spread(monkeypatch)
    pairs = [("zero1", "int8"), ("zero2", "topk"), ("zero2", "int4"), ("zero3", "int8")]
    for form, method in [*pairs, ("fsdp", "bf16"), ("zero3", "bf16"), ("offload", "int8")]:
        check(form, parameters=method)
    for form in ("zero2", "fsdp secondary", "zero3 secondary"):
        check(form, gradients="powersgd", parameters="topk" if form == "zero2" else "powersgd")


@pytest.mark.ranks(4)
def test_parameters_over_two_hosts_with_two_ranks_each(monkeypatch):
    spread(monkeypatch, 2)
    pairs = [("zero2", "int8"), ("fsdp", "int8"), ("zero3", "int8")]
    for form, method in [*pairs, ("fsdp secondary", "powersgd"), ("fsdp secondary", "topk")]:
        check(form, parameters=method)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "world", [pytest.param(n, marks=pytest.mark.ranks(n, timeout=900)) for n in (2, 4)]
)
@pytest.mark.parametrize("method", sorted(LIMITS))
def test_every_method_under_every_strategy(monkeypatch, method, world):
    per_host = world // 2
    spread(monkeypatch, per_host)
    kind = compressors().load(method)
    hybrids = ["fsdp hybrid"] if per_host > 1 else []
    each = [name for name in strategies().names if name != "local"]  # steps that are its own
    for form in [*each, "fsdp secondary", *hybrids]:
        section = dict(FORMS.get(form, {"name": form}))
        strategy, options = find_strategy(section.pop("name"))
        uses = strategy.channels(strategy.Config(**section) if section else options)
        if "gradients" in uses:
            check(form, gradients=method)
            for chance in (CHANCE, FREE) if method == "int4" else ():
                check(form, chance, gradients=method)
        values, updates = "parameters" in uses, "updates" in uses
        if (values and kind.parameters) or (updates and kind.updates and not values):
            check(form, parameters=method)


@pytest.mark.parametrize("form", ["zero2", "zero3"])
def test_what_a_script_reads_and_saves_of_approximate_parameters_is_exact(monkeypatch, form):
    spread(monkeypatch)
    training = Training(form, far={"parameters": "int8"}).train(2)
    found = training.state()
    shards = [shard for shard in training.strategy.state.shards() if not shard.state]
    assert shards
    for shard in shards:
        start, stop = shard.part.range
        flat = found[shard.name].reshape(-1)[start:stop]
        assert torch.equal(flat, shard.tensor.reshape(-1)), shard.name
    # Every rank steps on from the same values.
    outputs = training.accelerator.gather(training.model(batch(9, 0)).detach()[None])
    assert torch.equal(outputs[0], outputs[1])
    training.end()


def test_a_checkpoint_goes_on_bit_for_bit_and_under_another_method(monkeypatch, tmp_path):
    spread(monkeypatch)
    others = (("int8", {}), ("onebit", {}), ("powersgd", {}))
    for form, method, options, nows in (
        ("ddp", "int4", {}, others[:1]),
        ("ddp", "powersgd", {}, others[:1]),
        ("zero2", "int4", {}, others[:1]),
        ("fsdp hybrid", "topk", {}, others[:1]),
        ("ddp", "int4", FREE, others),
        ("zero2", "int8", CHANCE, others),
        ("fsdp hybrid", "int4", FREE, others),
    ):
        place = tmp_path / f"{form} {method} {len(options)}"
        training = Training(form, far={"gradients": method, "options": options}).train(2)
        training.accelerator.save_state(place)
        kept = summed_errors(training)
        assert all(bool(each.abs().max() > 0) is (options != FREE) for each in kept.values())
        expected = training.train().state()
        training.end()
        for now, chance in ((method, options), *nows):
            case = f"{form}, {method}, {options} and then {now}"
            training = Training(form, far={"gradients": now, "options": chance})
            training.accelerator.load_state(place)
            if "powersgd" not in (method, now):  # which has no errors where a row is cut
                torch.testing.assert_close(summed_errors(training), kept, rtol=0, atol=1e-6)
            training.step = 2
            found = training.train().state()
            assert same(found, expected) is ((now, chance) == (method, options)), case
            assert all(value.isfinite().all() for value in found.values()), case
            training.end()


def summed_errors(training: Training) -> dict[str, Tensor]:
    """Return the sum over ranks of the errors of each large matrix."""
    state, found = link_state(training), {}
    for name, parameter in model_of().named_parameters():
        if parameter.dim() < 2 or parameter.numel() < SMALLEST:
            continue
        errors = torch.zeros(parameter.numel())
        for (owner, kind), tensor in state.items():
            if owner == name and kind.startswith("links.error."):
                first = int(kind.rpartition(".")[2])
                errors[first : first + tensor.numel()] += tensor
        found[name] = training.accelerator.reduce(errors, "sum")
    return found


def link_state(training: Training) -> dict[tuple[str, str], Tensor]:
    """Return copies of what sums between hosts keep on this rank."""
    shards = training.strategy.state.shards()
    return {(s.name, s.state): s.tensor.clone() for s in shards if s.state.startswith("links.")}


def branches() -> nn.Module:
    """Return two branches, of which a step may use one."""
    parts = {"one": model_of(), "other": model_of(), "both": True}
    return Parts(lambda m, x: m.one(x) + m.other(x) if m.both else m.one(x), **parts)


@pytest.mark.ranks(4)
def test_errors_of_parameters_that_no_rank_uses_stay_as_they_were(monkeypatch):
    rank = spread(monkeypatch, 2)
    for form, method in (
        ("ddp", "int4"),
        ("ddp in buckets", "powersgd"),
        ("zero2", "int4"),
        ("zero3", "topk"),
        ("fsdp hybrid", "int4"),
    ):
        training = Training(form, branches, far={"gradients": method}).train(2)
        some = rank == 3 or form == "fsdp hybrid"  # where a rank alone cannot run a unit
        for uses, moved in ((False, ["one."]), (some, ["one.", "other."])):
            before = link_state(training)
            training.model.both = uses
            training.train()
            after = link_state(training)
            found = {
                key[0].partition(".")[0] + "."
                for key, value in before.items()
                if "error" in key[1] and not torch.equal(value, after[key])
            }
            everyone = gather_facts(sorted(found), list[str], doing="errors that changed")
            assert sorted(set().union(*everyone)) == moved, form
        training.end()


def test_a_step_with_nan_is_skipped_everywhere_and_leaves_all_errors_as_they_were(monkeypatch):
    """One rank has NaN in its loss, or in one bias alone, which other buckets do not see."""
    rank = spread(monkeypatch)
    factor = float("nan") if rank else 1.0
    for form, gradients, parameters in (
        ("ddp", "int4", "exact"),
        ("zero2", "powersgd", "powersgd"),
        ("zero3", "int4", "int8"),
        ("fsdp hybrid", "topk", "exact"),
        ("ddp in buckets", "int8", "exact"),
        ("zero2 in buckets", "int8", "exact"),
    ):
        far, found = {"gradients": gradients, "parameters": parameters}, []
        for bad in (False, True):
            training = Training(form, on_nonfinite="skip", far=far).train(2)
            if bad:
                before = link_state(training)
                assert before
                training.optimizer.zero_grad()
                if "buckets" in form:
                    bias = training.model[0].bias
                    hook = bias.register_hook(lambda gradient: gradient * factor)
                    training.accelerator.backward(training.loss(batch(5, 0)))
                    hook.remove()
                    assert list(training.strategy.gradients())
                    assert not same(before, link_state(training)), form
                else:
                    training.accelerator.backward(factor * training.loss(batch(5, rank)))
                training.optimizer.step()
                assert training.accelerator.optimizer_step_was_skipped
                after = link_state(training)
                assert after.keys() == before.keys()
                assert same(after, before), form
            found.append(training.train().state())
            training.end()
        assert same(*found), form


def test_ranks_with_different_methods_or_options_get_one_error(monkeypatch):
    rank = spread(monkeypatch)
    for far, key, values in (
        ({"gradients": ("int8", "int4")[rank]}, "gradients", ("int8", "int4")),
        ({"gradients": "int8", "options": {"block": (64, 128)[rank]}}, "options", (64, 128)),
        ({"gradients": "int8", "warmup_steps": rank}, "warmup_steps", (0, 1)),
    ):
        with pytest.raises(RankMismatchError, match="disagree on the configuration") as caught:
            Training("ddp", far=far)
        for said, value in zip(str(caught.value).split("rank 1 has"), values, strict=True):
            assert f"links.far.{key}" in said
            assert str(value) in said


def automatic(form: str, allow: str, mbit_per_s: float, **options: object) -> Training:
    links = {"far": "auto", "allow": allow, "mbit_per_s": mbit_per_s, "backward_s": 1e-9}
    return Training(form, **links, **options)


def test_auto_chooses_within_what_is_allowed_and_costs_count_its_bytes(monkeypatch):
    spread(monkeypatch)
    said: list[str] = []
    monkeypatch.setattr(prepared.logger, "announce", said.append)
    for form, allow, rate, names in (
        ("ddp", "theory", 1.0, ("topk", "exact")),
        ("ddp", "rounding", 1.0, ("bf16", "exact")),
        ("ddp", "theory", 1e9, ("exact", "exact")),
        ("zero2", "rounding", 1.0, ("bf16", "bf16")),
        ("zero3", "rounding", 1.0, ("bf16", "bf16")),
        ("zero3", "exact", 1.0, ("exact", "exact")),
        ("plain", "theory", 1.0, ("exact", "exact")),
    ):
        training = automatic(form, allow, rate)
        assert training.links.names == names, f"{form}, {allow}, {rate}"
        assert training.links.auto is None
        training.train().check_sent()
        training.end()
    begin = "between hosts, auto, rounding at most, 0.125 MB/s as links.mbit_per_s says: gradients "
    lines = [line for line in said if line.startswith(begin)]
    assert len(lines) == 3
    assert all("bf16 (rounding), for 2 of 8 parameters (8,192 numbers)" in line for line in lines)
    said.clear()
    training = automatic("ddp", "theory", 0.0)  # nobody has declared the link
    assert training.links.auto is None
    (line,) = [line for line in said if "MB/s measured now: gradients" in line]
    # All ranks, whatever each of them has measured, have chosen the same for the same reason.
    assert len(set(gather_facts(line, str, doing="the lines of all ranks"))) == 1
    training.end()


def lopsided() -> nn.Sequential:
    """Return a model of a small and a large matrix."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4 * WIDTH))


def test_auto_leaves_tensors_exact_for_which_a_method_does_not_pay(monkeypatch):
    rank = spread(monkeypatch)
    said: list[str] = []
    monkeypatch.setattr(prepared.logger, "announce", said.append)
    # bf16 saves 0.26 s of the large matrix at 1 Mbit/s, 0.07 s of the small one.
    monkeypatch.setattr(compressors().load("bf16"), "rehearse", lambda *_: time.sleep(0.12))
    chosen = automatic("ddp", "rounding", 1.0, make=lopsided).train()
    encoded = Training("ddp", make=lopsided, far={"gradients": "bf16"}).train()
    sent, all_encoded = chosen.check_sent(), encoded.check_sent()
    said_of = "gradients bf16 (rounding), for 1 of 4 parameters (16,384 numbers)"
    assert any(said_of in line for line in said)
    if rank == 0:
        # Rank 0 sends the small matrix to rank 1, which sums it, with 4 bytes a number, not 2.
        more = {key: sent[key] - all_encoded[key] for key in sent if sent[key] != all_encoded[key]}
        assert more == {("dp.far", "all_to_all"): 2 * WIDTH * WIDTH}
    chosen.end()
    encoded.end()
