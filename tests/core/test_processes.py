"""Who a process is, and doing things on one of them or in turn."""

import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

from drivetrain.errors import UsageError
from drivetrain.processes import DistributedType, PartialState, Processes, notebook_launcher
from drivetrain.runtime.world import World


class Selectable(list):
    """As a Hugging Face dataset: it is cut by ``select`` alone."""

    def select(self, indices):
        return tuple(self[i] for i in indices)


def processes(rank=0, size=1, local_rank=None, device="cpu"):
    local = rank if local_rank is None else local_rank
    return Processes(World(rank=rank, size=size, local_rank=local, device=torch.device(device)))


def shares(inputs, size, **options):
    found = []
    for rank in range(size):
        with processes(rank, size).split_between_processes(inputs, **options) as share:
            found.append(share)
    return found


def test_who_a_process_is():
    last = processes(rank=3, size=4, local_rank=0)
    assert (last.process_index, last.num_processes, last.local_process_index) == (3, 4, 0)
    assert (last.is_main_process, last.is_local_main_process) == (False, True)
    assert (last.is_last_process, last.use_distributed) == (True, True)
    alone = processes()
    assert alone.is_main_process
    assert alone.is_last_process
    assert not alone.use_distributed

    for size, device, kind in (
        (1, "cuda", "NO"),
        (2, "cpu", "MULTI_CPU"),
        (2, "cuda", "MULTI_GPU"),
        (2, "xpu", "MULTI_XPU"),
        (2, "mtia", "MULTI_OTHER"),
    ):
        assert processes(size=size, device=device).distributed_type is DistributedType[kind]
        assert DistributedType[kind] == kind

    alone = processes(size=1, device="cpu")
    for name in ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA", "TPU"):
        assert alone.distributed_type != DistributedType[name]
    assert alone.deepspeed_plugin is None
    assert alone.fsdp_plugin is None


def test_decorators_run_in_one_place_and_want_an_index():
    for name, arguments, expected in (
        ("on_main_process", {}, [0]),
        ("on_local_main_process", {}, [0, 2]),
        ("on_last_process", {}, [3]),
        ("on_process", {"process_index": 2}, [2]),
        ("on_local_process", {"local_process_index": 1}, [1, 3]),
    ):
        for called in (False, True):
            ran = []
            for rank in range(4):

                def work(value, *, plus=0, rank=rank, ran=ran):
                    """Words."""
                    ran.append(rank)
                    return value + plus

                decorator = getattr(processes(rank, 4, local_rank=rank % 2), name)
                decorated = decorator(**arguments)(work) if called else decorator(work, **arguments)
                assert (decorated.__name__, decorated.__doc__) == ("work", "Words.")
                assert decorated(1, plus=2) == (3 if rank in expected else None)
            assert ran == expected

    with pytest.raises(UsageError, match="process_index=N"):
        processes().on_process(print)
    with pytest.raises(UsageError, match="local_process_index=N"):
        processes().on_local_process()


def test_first_processes_get_the_extras_and_padding_repeats_the_last():
    assert shares(list(range(8)), 3) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert shares((0, 1), 3) == [(0,), (1,), ()]
    assert shares([], 2, apply_padding=True) == [[], []]

    for length, expected in (
        (5, [[0, 1], [2, 3], [4, 4]]),
        (4, [[0, 1], [2, 3], [3, 3]]),
        (6, [[0, 1], [2, 3], [4, 5]]),
        (1, [[0], [0], [0]]),
    ):
        assert shares(list(range(length)), 3, apply_padding=True) == expected


def test_split_takes_many_kinds_and_leaves_them_alone():
    tensor = torch.arange(6).view(3, 2)
    array = np.arange(3)
    inputs = {"text": ["a", "b", "c"], "x": tensor, "array": array}
    first, second = shares(inputs, 2, apply_padding=True)
    assert (first["text"], second["text"]) == (["a", "b"], ["c", "c"])
    assert second["x"].tolist() == [[4, 5], [4, 5]]
    assert second["array"].tolist() == [2, 2]
    second["x"].zero_()
    assert tensor.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert inputs["text"] == ["a", "b", "c"]
    assert inputs["x"] is tensor
    assert [len(share) for share in shares(TensorDataset(tensor), 2)] == [2, 1]
    assert shares(TensorDataset(tensor), 2)[1][0][0].tolist() == [4, 5]
    assert shares(Selectable("abc"), 2)[1] == ("c",)


def test_split_refuses_what_cannot_be_cut():
    for inputs, message in (
        ({"a": [1, 2], "b": [1]}, "one length"),
        ({"a": [1, 2], "b": 3}, "found int"),
        ("text", "found str"),
        ({1, 2}, "found set"),
        (torch.tensor(1), "found Tensor"),
        ({}.keys(), "found dict_keys"),
    ):
        with pytest.raises(UsageError, match=message):
            shares(inputs, 2)


@pytest.mark.ranks(2)
def test_one_is_first_and_its_exception_lets_the_others_go_on(tmp_path):
    state = PartialState(cpu=True)
    done = tmp_path / "done"
    with state.local_main_process_first():
        if state.is_main_process:
            time.sleep(0.3)
            done.write_text("done")
        assert done.exists()
    state.wait_for_everyone()

    state = PartialState(cpu=True)
    entered = False
    try:
        with state.main_process_first():
            entered = True
            if state.is_main_process:
                raise RuntimeError("no disk")
    except RuntimeError:
        assert state.is_main_process
    assert entered
    state.wait_for_everyone()

    first, second = PartialState(cpu=True), PartialState(cpu=True)
    assert first.process_index == second.process_index == dist.get_rank()
    assert first.__dict__ is not second.__dict__
    assert first.distributed_type == DistributedType.MULTI_CPU
    with first.split_between_processes([1, 2, 3]) as share:
        assert share == ([1, 2] if first.is_main_process else [3])
    with pytest.raises(UsageError, match="this process is a rank already"):
        notebook_launcher(print, num_processes=1)


def test_partial_state_alone():
    state = PartialState(cpu=True)
    assert (state.num_processes, state.device.type) == (1, "cpu")
    with state.main_process_first(), state.local_main_process_first():
        state.wait_for_everyone()
    state.destroy_process_group()
