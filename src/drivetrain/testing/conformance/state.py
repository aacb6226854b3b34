"""State and failures: shards cover the model once, runs go on; a failure reaches all ranks.

Failures: a failure of one rank becomes an error on the others, not a hang.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.errors import CollectiveError, RankMismatchError
from drivetrain.shards import Shard
from drivetrain.testing.conformance.accounts import cut_connections, is_supported
from drivetrain.testing.conformance.suite import Suite
from drivetrain.testing.conformance.twins import Twins, adamw, everyone, weights
from drivetrain.testing.models import CASES

# --- state ---


class StateChecks(Suite):
    """The yield of ``shards``, and save and load."""

    def test_shards_hold_everything_once(self, world: int) -> None:
        """Parameters, buffers and optimizer state, each element on exactly one rank."""
        with self.accelerator() as accelerator:
            for case in self.models("tied", "odd_shapes", "transposed", "batchnorm", "adapted"):
                twins = Twins(accelerator, case, adamw)
                twins.backward(0)
                twins.step()
                mine = [_sent(shard) for shard in accelerator.strategy_of(twins.model).shards()]
                whole = _assembled([shard for shards in everyone(mine) for shard in shards])
                parameters = weights(accelerator, twins.model)
                for key, tensor in parameters.items():
                    assert (key, "") in whole, f"{case.name}: no shard of the parameter {key}"
                    torch.testing.assert_close(whole[key, ""], tensor, rtol=0.0, atol=0.0)
                persistent = set(twins.twin.state_dict()) - {
                    key for key, _ in twins.twin.named_parameters(remove_duplicate=False)
                }
                assert {key for key, state in whole if not state} == {*parameters, *persistent}
                for key, parameter in twins.twin.named_parameters():
                    for state, value in twins.twin_optimizer.state.get(parameter, {}).items():
                        if value.shape == parameter.shape and parameter.dim() and value.numel():
                            torch.testing.assert_close(
                                whole[key, f"0.{state}"], value, rtol=1e-9, atol=1e-12
                            )
                accelerator.free_memory()

    def test_saved_run_goes_on_bit_by_bit(self, world: int, tmp_path: Path) -> None:
        """After load the next steps of several models give the same bits as without the stop."""
        results = []
        for resumed in (False, True):
            with self.accelerator() as accelerator:
                cases = self.models("tied", "odd_shapes", "mixed_dtypes", "batchnorm")
                trained = [Twins(accelerator, case, adamw) for case in cases]
                for twins in () if resumed else trained:
                    twins.train_alone(0, 2)
                load_or_save = accelerator.load_state if resumed else accelerator.save_state
                load_or_save(tmp_path)
                for twins in trained:
                    twins.train_alone(2, 4)
                results.append([weights(accelerator, twins.model) for twins in trained])
        for case, *both in zip(cases, *results, strict=True):
            for key, tensor in both[0].items():
                assert torch.equal(tensor, both[1][key]), f"{case.name}: {key} differs after load"


def _sent(shard: Shard) -> tuple[Any, ...]:
    """Return a shard as plain values, to be sent between ranks."""
    part = shard.part
    tensor = shard.tensor.detach().clone()
    return shard.name, shard.state, shard.shape, part.offsets, part.sizes, part.flat, tensor


def _assembled(shards: list[tuple[Any, ...]]) -> dict[tuple[str, str], Tensor]:
    """Put shards together; raise when an element is missing or there twice."""
    whole: dict[tuple[str, str], Tensor] = {}
    counts: dict[tuple[str, str], Tensor] = {}
    for name, state, shape, offsets, sizes, flat, tensor in shards:
        key = (name, state)
        box = tuple(slice(o, o + size) for o, size in zip(offsets, sizes, strict=True))
        values = whole.setdefault(key, torch.zeros(shape, dtype=tensor.dtype))
        count = counts.setdefault(key, torch.zeros(shape, dtype=torch.int64))
        held = torch.zeros(torch.Size(sizes), dtype=tensor.dtype)
        here = torch.zeros(torch.Size(sizes), dtype=torch.int64)
        start, stop = flat if flat is not None else (0, held.numel())
        held.view(-1)[start:stop] = tensor.reshape(-1)
        here.view(-1)[start:stop] = 1
        values[box] += held
        count[box] += here
    for (name, state), count in counts.items():
        times = sorted(set(count.flatten().tolist()))
        assert times in ([1], []), f"elements of {name} {state} are held {times} times, not once"
    return whole


# --- failures ---


class FailureChecks(Suite):
    """Errors that users will make."""

    def test_one_rank_that_dies(self, world: int) -> None:
        """When the process of one rank ends, backward fails on the others, before the timeout."""
        if world == 1 or not is_supported():
            pytest.skip("needs a rank to end and one to stay, and Linux")
        accelerator = self.make_accelerator()
        twins = Twins(accelerator, CASES["mlp"])
        twins.backward(0)
        twins.step()
        everyone(None)
        if accelerator.process_index == world - 1:
            cut_connections()
            accelerator.free_memory()
            return
        with pytest.raises(CollectiveError):
            accelerator.backward(twins.loss(1))
        accelerator.free_memory()

    def test_ranks_with_different_models(self, world: int) -> None:
        """``prepare`` names the first difference on every rank."""
        if world == 1:
            pytest.skip("needs two ranks to disagree")
        with self.accelerator() as accelerator:
            case = CASES["tied" if accelerator.process_index == 0 else "mlp"]
            with pytest.raises(RankMismatchError, match="rank"):
                accelerator.prepare(case.build())
