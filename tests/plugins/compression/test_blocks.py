"""Blocks of integers: rounded by chance without bias, by seeds, and no integer too large."""

import pytest
import torch

from drivetrain.compression.compressor import Fidelity
from drivetrain.errors import ConfigError
from drivetrain_compression.codes import BlockOptions, Blocks, Int4, Int8

BLOCK = 64
TIMES = 1000


def by_chance(kind: type[Blocks], *, feedback: bool = False, block: int = BLOCK) -> Blocks:
    return kind(BlockOptions(block=block, rounding="stochastic", feedback=feedback))


def message_of(method: Blocks, values: torch.Tensor, seed: int) -> torch.Tensor:
    message = torch.empty(method.nbytes(values.numel()), dtype=torch.uint8)
    method.encode_gradients(values, message, draws=torch.Generator().manual_seed(seed))
    return message


def sent_back(method: Blocks, values: torch.Tensor, seed: int) -> torch.Tensor:
    found = torch.empty_like(values)
    method.decode(message_of(method, values, seed), found)
    return found


def made_up(numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(5))


def steps_of(method: Blocks, values: torch.Tensor) -> torch.Tensor:
    """Return for each number the difference of two neighboring numbers of its block."""
    largest = torch.cat([each.abs().max().expand(each.numel()) for each in values.split(BLOCK)])
    return largest / method.steps


def test_the_mean_of_many_encodings_by_chance_is_the_number():
    for kind in (Int8, Int4):
        method, values = by_chance(kind), made_up(3 * BLOCK + 11)
        values[7] = 0.0
        step = steps_of(method, values)
        total = torch.zeros(values.numel(), dtype=torch.float64)
        for seed in range(TIMES):
            found = sent_back(method, values, seed)
            assert bool(((found - values).abs() <= 1.0001 * step).all())
            total += found
        share = (values.double() / step) % 1.0
        deviation = step * (share * (1 - share) / TIMES).sqrt()  # of the mean of so many draws
        apart = (total / TIMES - values).abs()
        assert bool((apart <= 5 * deviation + 1e-6).all())
        assert apart.max() > 0
        nearest = kind(BlockOptions(block=BLOCK))
        fixed = (sent_back(nearest, values, 0) - values).abs()
        assert bool((fixed > 5 * deviation + 1e-6).any())  # a rounding to the nearest does not pass


def test_draws_come_from_seeds_and_parameters_are_rounded_to_the_nearest():
    method, values = by_chance(Int8), made_up(1000)
    first = message_of(method, values, 3)
    torch.rand(5)  # draws of the script change nothing
    assert torch.equal(first, message_of(method, values, 3))
    assert not torch.equal(first, message_of(method, values, 4))
    nearest = Int8(BlockOptions(block=BLOCK))
    assert torch.equal(message_of(nearest, values, 3), message_of(nearest, values, 4))

    for kind in (Int8, Int4):
        values, messages, nearest = made_up(1000), [], kind(BlockOptions(block=BLOCK))
        for method in (by_chance(kind), by_chance(kind, feedback=True), nearest):
            messages.append(torch.empty(method.nbytes(1000), dtype=torch.uint8))
            method.encode(values, messages[-1])
        assert torch.equal(messages[0], messages[2])
        assert torch.equal(messages[1], messages[2])

    values = made_up(2 * BLOCK)
    for bad in (float("nan"), float("inf")):
        values[3] = bad
        found = sent_back(by_chance(Int4), values, 1)
        assert not found[3].isfinite()
        assert found[BLOCK:].isfinite().all()


def test_the_largest_numbers_of_blocks_never_come_back_with_the_other_sign():
    # The quotient of such a number and its scale may be a little above the largest integer.
    values = torch.zeros(16 * 4096)
    values[::16] = made_up(4096).abs() + 1.0
    values[8::16] = -values[::16]
    for seed in range(50):
        found = sent_back(by_chance(Int8, block=16), values, seed)
        assert torch.allclose(found, values, rtol=0.2)


def test_options_decide_what_is_kept_and_how_honest_a_method_is():
    nearest, kept, free = Int4(BlockOptions()), by_chance(Int4, feedback=True), by_chance(Int4)
    assert [each.keeps_feedback for each in (nearest, kept, free)] == [True, True, False]
    assert [each.draws for each in (nearest, kept, free)] == [False, True, True]
    assert {each.fidelity_of("gradients") for each in (nearest, kept, free)} == {Fidelity.THEORY}
    assert Int8(BlockOptions()).fidelity_of("parameters") is Fidelity.EMPIRICAL
    for kind, block, feedback, expected in (
        (Int4, 392, True, Fidelity.THEORY),
        (Int4, 393, True, Fidelity.EMPIRICAL),
        (Int4, 393, False, Fidelity.THEORY),
        (Int8, 65536, True, Fidelity.THEORY),
    ):
        method = by_chance(kind, feedback=feedback, block=block)
        assert method.fidelity_of("gradients") is expected
        assert method.fidelity_of("updates") is Fidelity.THEORY  # always to the nearest
    with pytest.raises(ConfigError, match="feedback: true with rounding: nearest, found false"):
        BlockOptions(feedback=False)
