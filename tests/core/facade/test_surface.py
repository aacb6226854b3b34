"""The public surface of the Accelerator, frozen: it changes only together with this list."""

import inspect

import torch
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator

METHODS = {
    "__init__": (
        "(*, strategy=None, config=None, device_placement=True, split_batches=None, "
        "mixed_precision=None, gradient_accumulation_steps=None, cpu=None, "
        "dataloader_config=None, rng_types=None, log_with=None, project_dir=None, "
        "project_config=None, gradient_accumulation_plugin=None, "
        "step_scheduler_with_optimizer=True, kwargs_handlers=None)"
    ),
    "accumulate": "(*models)",
    "autocast": "(autocast_handler=None)",
    "backward": "(loss, *, weight=None, **options)",
    "building": "(weights=None)",
    "clear": "(*objects)",
    "clip_grad_norm_": "(parameters, max_norm, norm_type=2.0)",
    "clip_grad_value_": "(parameters, clip_value)",
    "dtensors": "(model)",
    "free_memory": "(*objects)",
    "gather": "(tensor)",
    "gather_for_metrics": "(input_data, use_gather_object=False)",
    "gathered": "(what, parameters=None)",
    "get_state_dict": "(model, unwrap=True)",
    "get_tracker": "(name, unwrap=False)",
    "inference": "(model)",
    "init_trackers": "(project_name, config=None, init_kwargs=None)",
    "join_uneven_inputs": "(joinables, even_batches=None)",
    "load_state": "(input_dir=None, *, verify='full')",
    "resume": "(input_dir=None, *, verify='full')",
    "log": "(values, step=None, log_kwargs=None)",
    "micro_batches": "(batch, *models)",
    "metric_mean": "(value, count)",
    "no_sync": "(model)",
    "observe": "(observer)",
    "on_last_process": "(function=None)",
    "on_local_main_process": "(function=None)",
    "on_local_process": "(function=None, local_process_index=None)",
    "on_main_process": "(function=None)",
    "on_process": "(function=None, process_index=None)",
    "pad_across_processes": "(tensor, dim=0, pad_index=0, pad_first=False)",
    "pipeline_step": "(model, inputs, targets=None, *, loss_fn=None, weight=None)",
    "prepare": "(*args, device_placement=None, strategy=None)",
    "prepare_data_loader": "(data_loader, device_placement=None, slice_fn_for_dispatch=None)",
    "prepare_model": "(model, device_placement=None, evaluation_mode=False, *, strategy=None)",
    "prepare_optimizer": "(optimizer, device_placement=None)",
    "prepare_scheduler": "(scheduler)",
    "print": "(*args, **kwargs)",
    "profile": "(profile_handler=None)",
    "progress": "(iterable, *, total=None, desc='', every=0, disable=False)",
    "recompute": "(model, *, mode='full', blocks=(), every=1, keep='device', partition=None)",
    "reduce": "(tensor, reduction='sum', scale=1.0)",
    "register_for_checkpointing": "(*objects, encode=None, decode=None)",
    "register_load_state_pre_hook": "(hook)",
    "register_save_state_pre_hook": "(hook)",
    "save": "(obj, f, safe_serialization=False)",
    "save_model": (
        "(model, save_directory, max_shard_size='10GB', safe_serialization=True, *, "
        "only_trainable=False)"
    ),
    "save_state": "(output_dir=None, safe_serialization=True, *, overwrite=False, wait=True)",
    "skip_first_batches": "(dataloader, num_batches=0)",
    "split_between_processes": "(inputs, apply_padding=False)",
    "strategy_of": "(model)",
    "trigger_sync_in_backward": "(model)",
    "unscale_gradients": "(optimizer=None)",
    "unwrap_model": "(model, keep_fp32_wrapper=True, keep_torch_compile=True)",
}
"""The public methods that take arguments, with the defaults."""

BARE = """
check_trigger destroy_process_group end_training local_main_process_first main_process_first
set_trigger wait_for_checkpoint wait_for_everyone
"""
PROPERTIES = """
data_parallel_rank deepspeed_plugin device dispatch_batches distributed_type fp8_recipe_handler
fsdp_plugin is_last_process is_local_main_process is_main_process local_process_index
logging_dir mesh mixed_precision non_blocking num_processes optimizer_step_was_skipped
pipeline_parallel_rank preempted process_index should_save_model tensor_parallel_rank
project_dir save_iteration split_batches state trackers use_distributed use_seedable_sampler
use_stateful_dataloader
"""
SETTABLE = """
gradient_accumulation_steps native_amp project_configuration run step sync_gradients
"""
ATTRIBUTES = """
config device_placement even_batches gradient_state handlers precision report rng_types scaler
step_scheduler_with_optimizer traffic world
"""


def test_methods_properties_and_attributes_are_the_frozen_ones():
    frozen = (
        dict.fromkeys(BARE.split(), "()") | dict.fromkeys(PROPERTIES.split(), "property") | METHODS
    )
    frozen |= dict.fromkeys(SETTABLE.split(), "property, settable")
    names = ["__init__", *(name for name in dir(Accelerator) if not name.startswith("_"))]
    assert {name: shape(name) for name in names} == frozen
    found = {name for name in vars(Accelerator(cpu=True)) if not name.startswith("_")}
    assert found == set(ATTRIBUTES.split())


def test_verbs_go_through_the_verbs_that_a_subclass_overrides(tmp_path):
    accelerator = Overriding(cpu=True)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = DataLoader(TensorDataset(torch.ones(2, 2)))
    model, *_ = accelerator.prepare(model, optimizer, scheduler, loader)
    assert accelerator.called() == ["prepare_data_loader", "prepare_optimizer", "prepare_scheduler"]
    accelerator.pipeline_step(model, torch.ones(2, 2), loss_fn=lambda outputs, _: outputs.sum())
    assert accelerator.called() == ["backward"]
    accelerator.save_state(tmp_path / "saved")
    assert accelerator.called() == ["wait_for_checkpoint"]
    accelerator.load_state(tmp_path / "saved")
    assert accelerator.called() == ["wait_for_checkpoint", "wait_for_everyone"]
    with accelerator.main_process_first():
        assert accelerator.called() == []
    assert accelerator.called() == ["wait_for_everyone"]
    accelerator.clear()
    accelerator.end_training()
    assert accelerator.called() == ["free_memory", "free_memory"]


def shape(name: str) -> str:
    """Return the arguments of a method without their types, or whether a property can be set."""
    member = inspect.getattr_static(Accelerator, name)
    if isinstance(member, property):
        return "property, settable" if member.fset else "property"
    _, *arguments = inspect.signature(member).parameters.values()
    return str(inspect.Signature([a.replace(annotation=a.empty) for a in arguments]))


class Overriding(Accelerator):
    """Notes the verbs that other verbs call."""

    _called: tuple[str, ...] = ()

    def called(self) -> list[str]:
        called, self._called = list(self._called), ()
        return called


def _noting(name):
    def verb(self, *args, **options):
        self._called = (*self._called, name)
        return getattr(Accelerator, name)(self, *args, **options)

    return verb


for _name in (
    "backward",
    "free_memory",
    "prepare_data_loader",
    "prepare_optimizer",
    "prepare_scheduler",
    "wait_for_checkpoint",
    "wait_for_everyone",
):
    setattr(Overriding, _name, _noting(_name))
