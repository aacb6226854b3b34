"""What scripts written for Accelerate set and import, beyond the loop."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import drivetrain
from drivetrain import Accelerator, DataLoaderConfiguration, ProjectConfiguration
from drivetrain.errors import ConfigError, UsageError


@pytest.mark.ranks(2)
def test_even_batches_can_be_set_before_prepare():
    accelerator = Accelerator(cpu=True)
    assert accelerator.even_batches
    accelerator.even_batches = False
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(3.0)), batch_size=1))
    assert len(list(loader)) == 2 - accelerator.process_index


def test_prepared_objects_have_the_names_of_accelerate(tmp_path):
    project = ProjectConfiguration(save_on_each_node=True)
    for folder in (tmp_path, tmp_path / "next"):
        project.set_directories(folder)
    stateful = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=True, project_config=project, dataloader_config=stateful)
    assert accelerator.use_stateful_dataloader
    assert accelerator.logging_dir == str(tmp_path)
    assert accelerator.project_dir == str(tmp_path / "next")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    dataset = TensorDataset(torch.arange(4.0))
    sampler = drivetrain.SeedableRandomSampler(dataset, seed=3)
    loader = DataLoader(dataset, batch_size=2, sampler=sampler)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    assert isinstance(optimizer, drivetrain.AcceleratedOptimizer)
    assert isinstance(scheduler, drivetrain.AcceleratedScheduler)
    assert isinstance(loader, drivetrain.DataLoaderShard)
    assert sorted(torch.cat([x for (x,) in loader]).tolist()) == [0, 1, 2, 3]
    state = drivetrain.AcceleratorState("bf16", cpu=True)
    assert (state.num_processes, state.mixed_precision) == (1, "bf16")
    assert drivetrain.AcceleratorState(cpu=True).mixed_precision == "no"
    with pytest.raises(ConfigError, match="precision"):
        drivetrain.AcceleratorState("fp7", cpu=True)


def test_a_model_loses_its_wrapper_and_stays_compiled_unless_told():
    model, accelerator = nn.Linear(2, 2), Accelerator(cpu=True)
    backends = []
    compiled = torch.compile(model, backend="eager")
    assert drivetrain.extract_model_from_parallel(compiled) is compiled
    assert drivetrain.extract_model_from_parallel(compiled, keep_torch_compile=False) is model
    wrapped = torch.compile(nn.DataParallel(model), backend=lambda g, _: backends.append(g) or g)
    assert drivetrain.extract_model_from_parallel(wrapped, keep_torch_compile=False) is model
    assert accelerator.unwrap_model(wrapped, keep_torch_compile=False) is model
    kept = accelerator.unwrap_model(wrapped)
    assert kept._orig_mod is model
    assert isinstance(wrapped._orig_mod, nn.DataParallel)
    torch.testing.assert_close(kept(torch.ones(1, 2)), model(torch.ones(1, 2)))
    assert len(backends) == 1


@pytest.mark.ranks(2)
def test_a_model_that_was_not_prepared_can_be_saved(tmp_path):
    accelerator = Accelerator(cpu=True, strategy="zero3")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    average = copy.deepcopy(model)
    model = accelerator.prepare(model)
    state = accelerator.get_state_dict(average)
    torch.testing.assert_close(state, dict(average.state_dict()))
    accelerator.save_model(average, tmp_path)
    torch.testing.assert_close(load_file(tmp_path / "model.safetensors"), state)
    with pytest.raises(UsageError, match="found Linear"):
        accelerator.get_state_dict(model[0])  # its parameters may be divided
    accelerator.end_training()
