"""Bytes that pages state as formulas, against the costs of strategies and against real steps."""

import re

import pytest
import torch
from torch import nn

import page_numbers
from doc_pages import rows
from drivetrain import Accelerator
from drivetrain.runtime.precision import Precision
from drivetrain_megatron.pipeline.command import UNIT_DURATIONS
from drivetrain_megatron.pipeline.schedules import SCHEDULES, ActionKind
from page_numbers import BF16, BF16_REDUCED_IN_FP32, BLOCKS, ELEMENTS, FP32, SIDE, bytes_of_tier
from stacks import words

RANKS, GROUP, WINDOW = 4, 2, 3
STAYS = 3 / BLOCKS
"""Of the gathers for backward: two live units, and the first layer, whose values are not read."""
F, B, G = (RANKS - 1) / RANKS, 2, 4
PARAMETERS = 2 * BLOCKS


def cost(name, window=WINDOW, **options):
    return page_numbers.cost(name, options, BF16_REDUCED_IN_FP32, RANKS, window)


def test_bytes_sent_by_zero():
    for name, reductions, gathers, options in (
        ("zero1", 1, 1, {}),
        ("zero2", WINDOW, 1, {}),
        ("zero3", WINDOW, (2 - STAYS) * WINDOW, {}),
        ("zero3", WINDOW, WINDOW, {"reshard_after_forward": False}),
    ):
        assert cost(name, **options).sent == pytest.approx(
            {
                ("dp", "reduce_scatter"): reductions * F * G * ELEMENTS,
                ("dp", "all_gather"): gathers * F * B * ELEMENTS,
                ("dp", "all_reduce"): reductions * 2 * F * PARAMETERS,
            }
        ), (name, options)


def test_bytes_sent_and_lent_by_fsdp():
    for options, gathers, near in (
        ({}, 2 * WINDOW - WINDOW * STAYS, 0),
        ({"live_units": 4}, 2 * WINDOW - WINDOW * (STAYS + 2 / BLOCKS), 0),
        ({"reshard_after_forward": False}, WINDOW, 0),
        ({"reshard_after_forward": 2}, WINDOW, WINDOW - WINDOW * STAYS),
        ({"sharding": "grad"}, 1, 0),
    ):
        expected = {
            ("dp", "reduce_scatter"): WINDOW * F * G * ELEMENTS,
            ("dp", "all_gather"): gathers * F * B * ELEMENTS,
            ("dp", "all_reduce"): WINDOW * 2 * F * PARAMETERS,
            ("dp.near", "all_gather"): near * (GROUP - 1) / GROUP * B * ELEMENTS,
        }
        found = cost("fsdp", **options).sent
        assert found == pytest.approx({key: n for key, n in expected.items() if n}), options
    groups = RANKS // GROUP
    inside, between = (GROUP - 1) / GROUP, (groups - 1) / groups
    for window in (1, WINDOW):
        found = cost("fsdp", window, sharding="hybrid", shard_size=GROUP).sent
        assert found == pytest.approx(
            {
                ("dp.near", "reduce_scatter"): window * inside * G * ELEMENTS,
                ("dp.near", "all_gather"): window * (2 - STAYS) * inside * B * ELEMENTS,
                ("dp.far", "all_reduce"): 2 * between * G * ELEMENTS / GROUP,
                ("dp", "all_reduce"): 2 * F * PARAMETERS,
            }
        )
    local, each = cost("fsdp", accumulate="local").sent, cost("fsdp").sent
    assert local["dp", "reduce_scatter"] * WINDOW == each["dp", "reduce_scatter"]
    assert local["dp", "all_gather"] == each["dp", "all_gather"]
    assert cost("fsdp").held["lent"] == 2 * 4 * SIDE * SIDE


def test_fsdp_holds_as_many_bytes_as_zero3():
    policies = [
        *page_numbers.POLICIES.values(),
        Precision.of("bf16", reduce=torch.bfloat16),
        Precision.of("bf16", param=torch.bfloat16, master=None),
        Precision.of("fp16", param=torch.float16),
    ]
    for precision in policies:
        ours, theirs = (
            {kind: n for kind, n in held.items() if kind != "lent"}
            for name in ("fsdp", "zero3")
            for held in [page_numbers.cost(name, {}, precision, RANKS).held]
        )
        assert sum(ours.values()) == pytest.approx(sum(theirs.values()), rel=1e-3), precision


def test_bytes_that_offload_adds_and_leaves():
    """Late updates take more host memory; what ``ratio`` leaves stays on the device."""
    for precision, device, more in (
        (BF16, "cuda", 4),
        (FP32, "cuda", 8),
        (BF16, "cpu", 4),
        (FP32, "cpu", 12),
    ):
        late, usual = (
            bytes_of_tier(
                "host", "zero3", {"optimizer": "cpu", **more_options}, precision, device=device
            )
            for more_options in ({"delayed": True}, {})
        )
        assert late - usual == pytest.approx(more)
    half, whole = (
        bytes_of_tier("device", "zero2", {"optimizer": "cpu", "ratio": ratio}, BF16)
        for ratio in (0.5, 1.0)
    )
    assert half - whole == pytest.approx(16 / 2, rel=0.05)  # in whole units


def test_formulas_of_schedules_are_those_of_the_simulator():
    header = "schedule | makespan | idle | most kept, in micro-batches"
    table = rows("docs/inside/megatron.md", header)
    assert [name.strip("`") for name, *_ in table] == list(SCHEDULES)
    forward, backward = (UNIT_DURATIONS[kind] for kind in (ActionKind.FORWARD, ActionKind.BACKWARD))
    values = {"p": 4, "m": 8, "v": 2, "F": forward, "B": backward}
    for name, makespan, idle, _ in table:
        chunks = 2 if name == "`interleaved`" else 1
        found = page_numbers.timeline(name.strip("`"), ranks=4, micro_batches=8, chunks=chunks)
        assert evaluated(makespan, values) == pytest.approx(found.makespan)
        assert evaluated(idle, values) == pytest.approx(found.idle)


def evaluated(formula, values):
    """Return the value of a formula, in which things side by side are multiplied."""
    product = re.sub(r"(?<=[\dmv)])(?=[a-zA-Z(])", "*", formula)
    return eval(product, {"__builtins__": {}}, dict(values))


# --- steps of megatron ---

ROWS, LENGTH, WIDTH, WORDS = 4, 6, 32, 64
A = ROWS * LENGTH * WIDTH * 4
"""Bytes of one activation in fp32."""


def sent(blocks, **options):
    """Return the bytes that a third step sends, which compares no batches any more."""
    torch.manual_seed(0)
    accelerator = Accelerator(strategy={"name": "megatron", **options}, cpu=True)
    given = {"blocks": blocks, "bias": False, "act": nn.ReLU, "norm": nn.LayerNorm}
    model = accelerator.prepare(words(WORDS, WIDTH, 3 * WIDTH, **given))
    tokens = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % WORDS
    for _ in range(3):
        accelerator.run.traffic.clear()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        accelerator.backward(loss)
    found = accelerator.run.traffic.sent()
    accelerator.free_memory()
    return found


@pytest.mark.ranks(2, timeout=280)
def test_bytes_sent_by_megatron():
    """A boundary of stages costs an activation; the loss goes from the last rank to the first."""
    f, labels = 1 / 2, ROWS * LENGTH * 4
    outside = 2 * f * A + 2 * f * A + 3 * 2 * f * labels  # embedding, head, loss
    for blocks in (2, 3):
        assert sent(blocks, tp=2) == {("tp", "all_reduce"): blocks * 4 * f * A + outside}
        partial = blocks * 3 * WIDTH * 4  # norm, and the row's bias
        assert sent(blocks, tp=2, sequence_parallel=True) == {
            ("tp", "all_reduce"): outside + 2 * f * partial,
            ("tp", "all_gather"): blocks * 2 * f * A + 2 * f * A,
            ("tp", "reduce_scatter"): blocks * 2 * f * A,
        }
    found = sent(2, pp=2, micro_batches=2)
    assert found.pop(("pp", "send")) == A
    assert all(key == ("pp", "broadcast") and count <= 8 for key, count in found.items())
