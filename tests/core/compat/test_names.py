"""Names of Accelerate: where each comes from, and how many uses in scripts find one."""

import importlib
import inspect

import accelerate as real
import pytest

from drivetrain.compat import accelerate as ours
from drivetrain.compat import names
from drivetrain.errors import UsageError

IMPORTED = """
set_seed=126 get_logger=100 ProjectConfiguration=90 DistributedDataParallelKwargs=32
DistributedType=23 is_peft_model=21 init_empty_weights=18 clear_device_cache=7 is_initialized=7
FullyShardedDataParallelPlugin=5 DummyOptim=3 DummyScheduler=3 AlignDevicesHook=3
remove_hook_from_module=3 set_module_tensor_to_device=3 DeepSpeedPlugin=2 TorchDynamoPlugin=2
write_basic_config=2 dispatch_model=2 infer_auto_device_map=2 cpu_offload_with_hook=2
DDPCommunicationHookType=1 DynamoBackend=1 compare_versions=1 MODEL_NAME=1 LocalSGD=1
"""
MEMBERS = """
device=917 is_main_process=501 num_processes=402 unwrap_model=275 is_local_main_process=201
sync_gradients=184 mixed_precision=184 print=165 save_state=159 prepare=148 backward=101
accumulate=101 wait_for_everyone=98 log=97 init_trackers=91 end_training=90 clip_grad_norm_=88
load_state=86 register_save_state_pre_hook=75 register_load_state_pre_hook=73 native_amp=66
main_process_first=49 deepspeed_plugin=20 get_state_dict=22 fsdp_plugin=7 parallelism_config=3
dataloader_config=2 register_for_checkpointing=1 autocast=1
"""
"""Files, or uses, of a name among 370 files of 13 repositories; 1 where nobody counted."""


def uses(text: str) -> dict[str, int]:
    return {name: int(count) for name, _, count in (each.partition("=") for each in text.split())}


def test_names_arguments_and_versions_are_those_of_accelerate():
    accelerator = ours.Accelerator(cpu=True)
    imported, members = uses(IMPORTED), uses(MEMBERS)
    absent = [name for name in imported if isinstance(getattr(ours, name), names.NoCounterpart)]
    found = sum(count for name, count in imported.items() if name not in absent)
    found += sum(count for name, count in members.items() if hasattr(accelerator, name))
    assert found / sum([*imported.values(), *members.values()]) >= 0.99

    theirs = list(inspect.signature(real.Accelerator).parameters)
    assert list(inspect.signature(ours.Accelerator).parameters)[: len(theirs)] == theirs
    for name in ("ProjectConfiguration", "DataLoaderConfiguration", "ProfileKwargs"):
        fields = list(inspect.signature(getattr(ours, name)).parameters)
        theirs = list(inspect.signature(getattr(real.utils, name)).parameters)
        assert fields[: len(theirs)] == theirs[: len(fields)], name

    assert ours.utils.is_torch_version(">=", "2.0")
    assert not ours.utils.compare_versions("torch", "<", "2.0")
    assert ours.utils.compare_versions("1.9.0", "<", "1.10")
    with pytest.raises(UsageError, match="expected one of"):
        ours.utils.compare_versions("torch", "=", "2.0")


def test_unknown_names_and_real_processes_are_refused():
    with pytest.raises(ModuleNotFoundError, match=r"accelerate.test_utils has no counterpart"):
        importlib.import_module(f"{ours.__name__}.test_utils")
    with pytest.raises(AttributeError, match="'set_seeds'; did you mean 'set_seed'"):
        ours.utils.set_seeds  # noqa: B018

    found = ours.utils.save_fsdp_model
    assert not isinstance(object(), found)
    with pytest.raises(UsageError, match="save_fsdp_model has no counterpart"):
        found(None)
    with pytest.raises(UsageError, match="GradientState has no counterpart.*sync_gradients"):
        ours.state.GradientState.remainder  # noqa: B018
    assert not hasattr(found, "__wrapped__")
