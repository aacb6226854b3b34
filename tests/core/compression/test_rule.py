"""The rule that chooses a method: by the link, the compute, the size of tensors, and fidelity."""

from dataclasses import replace

import pytest
import torch

from drivetrain.collectives.volume import FlatSlice, ParameterRow
from drivetrain.compression import automatic as figures
from drivetrain.compression.compressor import Fidelity
from drivetrain.compression.methods import (
    NO_TIME,
    CrossingTensor,
    EncodingTime,
    LinkUse,
    MethodOnLink,
    SlowLink,
    choose,
    permitted,
)
from drivetrain.registry import compressors

LARGE = CrossingTensor(1024, 1024, torch.float32)
SMALL = CrossingTensor(64, 64, torch.float32)
VECTOR = CrossingTensor(1024, 1, torch.float32)
MODEL = [LARGE, LARGE, VECTOR]
TIME = EncodingTime(1e-4, 2e-9)

METHODS = {name: compressors().load(name) for name in compressors().names}
METHODS = {name: kind(kind.Config()) for name, kind in METHODS.items()}

SLOW, QUICK = 12.5e6, 12.5e9
EXACT_S = 2 * (4 * 2**20) / SLOW
"""Seconds of the sums of MODEL's matrices between two hosts over the slow link."""


def link(rate: float = SLOW, hosts: int = 2, per_host: int = 1) -> SlowLink:
    return SlowLink(bytes_per_s=rate, hosts=hosts, per_host=per_host)


def gradients(hidden_s: float = 0.0, *, everywhere: bool = True) -> LinkUse:
    return LinkUse("gradients", everywhere, hidden_s)


def on(name: str, over: SlowLink, use: LinkUse, time: EncodingTime = TIME) -> MethodOnLink:
    if name == "exact":
        return MethodOnLink(name, None, Fidelity.EXACT, NO_TIME, over, use)
    method = METHODS[name]
    return MethodOnLink(name, method, method.fidelity_of(use.name), time, over, use)


def chosen(
    allow: str, over: SlowLink, use: LinkUse, time: EncodingTime = TIME, **others: EncodingTime
) -> str:
    """Return the chosen method, where all take the same time but for some others."""
    names = permitted(METHODS, use.name, Fidelity(allow))
    methods = [on(name, over, use, others.get(name, time)) for name in names]
    found, _ = choose(on("exact", over, use), methods, MODEL)
    return found.candidate.name


def test_nothing_approximate_is_chosen_without_permission_and_no_class_beyond_it():
    assert permitted(METHODS, "gradients", Fidelity.EXACT) == {}
    assert list(permitted(METHODS, "gradients", Fidelity.ROUNDING)) == ["bf16"]
    # int8 rounds values of parameters without a proof, and updates with one.
    assert "int8" not in permitted(METHODS, "parameters", Fidelity.THEORY)
    assert "int8" in permitted(METHODS, "parameters", Fidelity.EMPIRICAL)
    assert "int8" in permitted(METHODS, "updates", Fidelity.THEORY)
    assert "topk" not in permitted(METHODS, "parameters", Fidelity.EMPIRICAL)
    assert chosen("exact", link(), gradients()) == "exact"
    assert chosen("rounding", link(), gradients()) == "bf16"


def test_the_least_approximate_method_that_hides_or_the_quickest_is_taken():
    assert chosen("theory", link(), gradients(1.01 * EXACT_S)) == "exact"
    assert chosen("theory", link(), gradients(0.6 * EXACT_S)) == "bf16"
    assert chosen("theory", link(), gradients(0.6 * EXACT_S), topk=NO_TIME) == "bf16"
    assert chosen("theory", link(), gradients(0.3 * EXACT_S)) == "int8"
    assert chosen("theory", link(), gradients(0.15 * EXACT_S)) == "int4"

    assert chosen("theory", link(), gradients()) == "topk"
    slower = EncodingTime(0.02, 0.0)
    assert chosen("theory", link(), gradients(), topk=slower) == "powersgd"
    assert chosen("rounding", link(), gradients(0.3 * EXACT_S)) == "bf16"


def test_a_method_that_takes_longer_than_it_saves_is_not_chosen():
    assert chosen("theory", link(QUICK), gradients()) == "exact"
    # bf16 halves the bytes of a large tensor: that saves half of its seconds.
    saved_s = 2**20 * 2 / SLOW
    for share, expected in ((0.99, "bf16"), (1.01, "exact")):
        time = EncodingTime(0.0, share * saved_s / 2**20)
        assert chosen("rounding", link(), gradients(), time) == expected
    # Compute hides traffic alone: an encoding may take longer than what stays in sight without it.
    time = EncodingTime(0.0, 0.6 * saved_s / 2**20)
    assert chosen("rounding", link(), gradients(0.9 * EXACT_S), time) == "exact"


def test_small_tensors_stay_exact_and_large_ones_do_not():
    method = on("int8", link(), gradients(), EncodingTime(5e-3, 0.0))
    assert method.pays_for(LARGE)
    assert not method.pays_for(SMALL)
    assert not method.pays_for(VECTOR)
    rows = [ParameterRow("large", (1024, 1024), 0, 0), ParameterRow("small", (64, 64), 0, 2**20)]
    whole = FlatSlice.of(2**20 + 2**12, torch.float32, rows)
    ((left,),) = method.approximated([[whole]])
    assert [span.name for span in left.spans] == ["large"]
    assert left.numel == whole.numel
    # A rank's piece is judged as the whole parameter, so that all ranks judge alike.
    ((piece,),) = method.approximated([[whole.cut(2**20 - 10, whole.numel)]])
    assert [(span.name, span.stop) for span in piece.spans] == [("large", 10)]


def test_outlooks_count_what_hosts_send():
    use = gradients()
    exact = on("exact", link(), use).outlook(MODEL)
    assert exact.link_s == pytest.approx(EXACT_S + 4096 / SLOW)
    assert (exact.work_s, exact.tensors) == (0.0, 0)
    bf16 = on("bf16", link(), use).outlook(MODEL)
    assert bf16.link_s == pytest.approx(EXACT_S / 2 + 4096 / SLOW, rel=1e-4)
    assert bf16.work_s == pytest.approx(2 * TIME.of(2**20))
    assert (bf16.tensors, bf16.numel) == (2, 2 * 2**20)
    # More ranks of a host send as much together, and encode a part each.
    shared = on("bf16", link(per_host=4), use).outlook(MODEL)
    assert shared.link_s == pytest.approx(bf16.link_s, rel=1e-4)
    assert shared.work_s == pytest.approx(2 * TIME.of(2**18))
    # A sum for its owners alone crosses once, and so do parameters.
    owners = on("exact", link(), replace(use, everywhere=False)).outlook(MODEL)
    assert owners.link_s == pytest.approx(exact.link_s / 2)
    values = on("exact", link(), LinkUse("parameters", everywhere=True, hidden_s=0.0))
    assert values.outlook(MODEL).link_s == pytest.approx(exact.link_s / 2)
    assert on("int8", link(), values.use).outlook(MODEL).link_s < exact.link_s / 7


def test_the_time_of_an_encoding_is_that_of_the_slowest_rank(monkeypatch):
    numels = [rows * figures.COLUMNS for rows in figures.ROWS]
    every = [
        {"int8": (fixed + each * numels[0], fixed + each * numels[1])}
        for fixed, each in ((2e-3, 3e-9), (1e-3, 1e-9))
    ]
    monkeypatch.setattr(figures, "_times", lambda methods, clock: every[1])
    monkeypatch.setattr(figures, "gather_facts", lambda mine, kind, doing: every)
    found = figures.slowest_times({"int8": None}, torch.device("cpu"))["int8"]
    assert found.fixed_s == pytest.approx(2e-3)
    assert found.per_number_s == pytest.approx(3e-9)
