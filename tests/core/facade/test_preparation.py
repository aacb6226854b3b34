"""prepare() keeps order and identity, and refuses what cannot work with a clear error."""

import math
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import (
    Accelerator,
    ConfigError,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    RankMismatchError,
    UnknownPluginError,
    UsageError,
)


def test_order_and_identity():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.zeros(4, 2)), batch_size=2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    given = (loader, scheduler, None, model, [1], optimizer)
    loader, scheduler, *rest, prepared = accelerator.prepare(*given)
    assert rest == [None, model, [1]]
    assert isinstance(loader, DataLoader)
    assert isinstance(prepared, torch.optim.Optimizer)
    assert scheduler.optimizers == [prepared]
    for each in (model, prepared, loader):
        assert accelerator.prepare(each) is each
    assert accelerator.prepare(optimizer) is prepared
    assert len(accelerator._state.models) == len(accelerator._state.optimizers) == 1
    assert accelerator.unwrap_model(model) is model
    assert accelerator.free_memory(model, loader) == [None, None]


@pytest.mark.parametrize(("with_optimizer", "rate"), [(True, 0.5), (False, 0.25)])
def test_a_schedule_may_step_inside_of_a_window(with_optimizer, rate):
    options = {"step_scheduler_with_optimizer": with_optimizer}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    for number in range(3):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            if number:  # torch wants a step before
                schedule.step()
    assert schedule.get_last_lr() == [rate]


def test_a_model_on_several_devices_is_refused():
    for places, quantized, refused in (
        ({"": "cpu"}, False, False),
        ({"": "cpu"}, True, True),
        ({"": 0}, True, False),
        ({"0": 0, "1": 1}, False, True),
        ({"": "disk"}, False, True),
    ):
        model = nn.Sequential(nn.Linear(2, 2))
        model[0].hf_device_map, model[0].is_loaded_in_4bit = places, quantized
        error = pytest.raises(UsageError, match="found hf_device_map with .*: load it without")
        with error if refused else nullcontext():
            Accelerator(cpu=True).prepare(model)


def test_a_criterion_may_be_prepared_and_is_no_model(tmp_path):
    accelerator = Accelerator(cpu=True)
    criterion = nn.CrossEntropyLoss(weight=torch.ones(2))
    model, prepared = accelerator.prepare(nn.Linear(2, 2), criterion)
    assert prepared is criterion
    accelerator.backward(criterion(model(torch.ones(1, 2)), torch.tensor([0])))
    accelerator.save_state(tmp_path / "c")
    accelerator.load_state(tmp_path / "c")


def test_a_submodule_stands_for_its_model_in_accumulate():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    for synchronized in (False, True):
        with accelerator.accumulate(model[0]):
            assert accelerator.sync_gradients == synchronized
            accelerator.backward(model(torch.ones(1, 2)).sum())
    refused = pytest.raises(UsageError, match="prepared, found Linear")
    with refused, accelerator.accumulate(nn.Linear(2, 2)):
        pass


def test_options_reach_the_run_and_a_trigger_is_lowered_when_it_was_seen():
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=1,
        gradient_accumulation_plugin=GradientAccumulationPlugin(2, sync_each_batch=True),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(days=1, seconds=5))],
    )
    assert accelerator.gradient_accumulation_steps == 2
    assert accelerator.gradient_state.sync_each_batch
    assert accelerator.config.run.launch.timeout_s == 86_405
    accelerator.set_trigger()
    assert [accelerator.check_trigger(), accelerator.check_trigger()] == [True, False]
    for logs, expected in ((None, "runs"), ("logs", "logs")):
        project = ProjectConfiguration("runs", logging_dir=logs)
        accelerator = Accelerator(cpu=True, project_config=project, config={"report": False})
        assert (accelerator.project_dir, accelerator.logging_dir) == ("runs", expected)


def test_0_is_a_seed_for_data_too():
    def order(seed, data_seed=None):
        options = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=data_seed)
        accelerator = Accelerator(cpu=True, config={"seed": seed}, dataloader_config=options)
        loader = accelerator.prepare(DataLoader(list(torch.arange(32)), shuffle=True))
        return [int(batch) for batch in loader]

    assert order(1, data_seed=0) == order(0) != order(1)


def test_wrong_arguments():
    two = {"gradient_accumulation_plugin": GradientAccumulationPlugin(2)}
    folders = {"project_dir": "a", "project_config": ProjectConfiguration("b")}
    for options, error, message in (
        (two | {"gradient_accumulation_steps": 3}, UsageError, "found both: 3 and 2"),
        (folders, UsageError, "found a and b in project_config"),
        ({"kwargs_handlers": [3]}, UsageError, "AutocastKwargs, .*, found 3"),
        ({"kwargs_handlers": 2 * [ProfileKwargs()]}, UsageError, "one ProfileKwargs, found two"),
        ({"mixed_precision": "fp4"}, ConfigError, "precision"),
        ({"config": {5: 1}}, ConfigError, "unknown key 5; valid keys"),
        ({"strategy": "zeero"}, UnknownPluginError, "installed: .*ddp"),
        ({"strategy": {"name": "ddp", "bucket_mb": 3}}, ConfigError, "did you mean 'bucket_mib'"),
    ):
        with pytest.raises(error, match=message):
            Accelerator(cpu=True, **options)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    output = model(torch.ones(3, 2))
    foreign = [nn.Parameter(torch.zeros(7, 3))]
    for verb, arguments, message in (
        (accelerator.prepare, [nn.Linear(2, 2)], "device_placement"),
        (accelerator.register_for_checkpointing, [3], "state_dict"),
        (accelerator.save_state, ["x", False], "found False; checkpoints hold no pickles"),
        (accelerator.save_model, [model, "x", "1GB", False], "found False; no pickles"),
        (accelerator.gathered(foreign).__enter__, [], "prepared models, found another tensor"),
        (setattr, [accelerator, "native_amp", True], "native_amp to stay False, found True"),
        (accelerator.profile(ProfileKwargs(["gpu"])).__enter__, [], r"'cuda'.*found \['gpu'\]"),
        (accelerator.clip_grad_norm_, [foreign, 1.0], "foreign|none"),
        (accelerator.prepare, [torch.optim.SGD(foreign)], r"one of shape \(7, 3\) in group 0"),
        (setattr, [accelerator, "gradient_accumulation_steps", 0], "at least 1, found 0"),
        (accelerator.backward, [output], "scalar loss, found shape"),
        (accelerator.backward, [output.sum().detach()], "requires grad"),
        (accelerator.backward, [3.0], "found float"),
    ):
        options = {"device_placement": [True, False]} if message == "device_placement" else {}
        with pytest.raises(UsageError, match=message):
            verb(*arguments, **options)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.ranks(2)
def test_what_averages_gradients_already_is_refused(strategy):
    """Torch's wrapper before or after, or another Accelerator: averaged twice, they are halved."""
    first, second = (Accelerator(strategy=strategy, cpu=True) for _ in range(2))
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="found DistributedDataParallel around Linear"):
        first.prepare(nn.parallel.DistributedDataParallel(model))
    first.prepare(model)
    with pytest.raises(UsageError, match="around a prepared model"):
        nn.parallel.DistributedDataParallel(model)
    for again in (model, nn.Sequential(model)):
        with pytest.raises(UsageError, match="not prepared yet, found Linear"):
            second.prepare(again)
    first.free_memory()
    if strategy == "ddp":
        second.prepare(model)
    second.free_memory()


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
@pytest.mark.ranks(2)
def test_wrappers_from_before_free_memory_are_prepared_as_what_is_inside(strategy):
    accelerator = Accelerator(strategy=strategy, cpu=True)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, before, schedule = accelerator.prepare(model, optimizer, schedule)
    accelerator.free_memory()
    other = Accelerator(strategy=strategy, cpu=True, gradient_accumulation_steps=2)
    divided = pytest.raises(UsageError, match="found a foreign one of shape")
    with nullcontext() if strategy == "ddp" else divided:
        model, after, schedule = other.prepare(model, before, schedule)
        assert schedule.optimizers == [after]
        assert after is not before
        assert after.optimizer is optimizer
    other.free_memory()


@pytest.mark.ranks(2)
def test_a_loader_that_something_else_prepared_is_divided_and_ends_windows():
    rows = DataLoader(torch.utils.data.TensorDataset(torch.arange(6.0)), batch_size=1)
    first, second = (Accelerator(cpu=True, gradient_accumulation_steps=2) for _ in range(2))
    model = second.prepare(nn.Linear(1, 1))
    loader = second.prepare(first.prepare(rows))
    assert second.prepare(loader) is loader
    ends = []
    for _ in loader:
        with second.accumulate(model):
            ends.append(second.sync_gradients)
    assert ends == [False, True, True]
    with pytest.raises(UsageError, match="divides before batches of it are skipped"):
        second.prepare(second.skip_first_batches(rows, 1))
    first.end_training()
    second.end_training()


@pytest.mark.ranks(2)
def test_ranks_that_differ_are_refused():
    rank = dist.get_rank()
    with pytest.raises(RankMismatchError, match="accumulation = 1.*accumulation = 2"):
        Accelerator(cpu=True, gradient_accumulation_steps=1 + rank)
    accelerator = Accelerator(cpu=True)
    with pytest.raises(RankMismatchError, match=r"parameter weight \(3, 2\).*weight \(4, 2\)"):
        accelerator.prepare(nn.Linear(2, 3 + rank))
    shapes = r"rank 0: float32\(1, 2\); rank 1: float32\(2, 2\)"
    with pytest.raises(RankMismatchError, match=shapes):
        accelerator.gather(torch.ones(rank + 1, 2))
    accelerator.end_training()


def test_clipping_two_models_to_one_norm():
    torch.manual_seed(0)
    for kind in (2.0, math.inf):
        accelerator = Accelerator(cpu=True)
        models = accelerator.prepare(*[nn.Linear(4, 4).double() for _ in range(2)])
        x = torch.ones(1, 4, dtype=torch.float64)
        accelerator.backward(models[1](models[0](x)).square().sum())
        parameters = [p for model in models for p in model.parameters()]
        expected = torch.nn.utils.get_total_norm([p.grad for p in parameters], kind)
        total = accelerator.clip_grad_norm_(parameters, 0.5, kind)
        torch.testing.assert_close(total, expected)
        clipped = torch.nn.utils.get_total_norm([p.grad for p in parameters], kind)
        assert float(clipped) == pytest.approx(0.5, rel=1e-5)


def test_clipping_a_part_of_a_model_leaves_the_rest():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    accelerator.backward(100 * model(torch.ones(1, 4)).square().sum())
    kept = model[1].weight.grad.clone()
    accelerator.clip_grad_value_(model[0].parameters(), 1e-3)
    assert float(model[0].weight.grad.abs().max()) <= 1.001e-3
    accelerator.clip_grad_norm_(model[0].parameters(), 1e-3)
    assert torch.equal(model[1].weight.grad, kept)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model[0].parameters()])
    assert float(norm) <= 1.001e-3


def test_options_of_ddp_are_left_out_where_a_strategy_has_none(monkeypatch):
    said = []
    monkeypatch.setattr("drivetrain.facade.settings.logger.announce", said.append)
    given = {"bucket_cap_mb": 50, "broadcast_buffers": False, "comm_hook": "bf16"}
    kwargs = DistributedDataParallelKwargs(**given)
    for strategy in ("ddp", "zero2", "fsdp", "offload"):
        said.clear()
        accelerator = Accelerator(cpu=True, strategy=strategy, kwargs_handlers=[kwargs])
        options = accelerator.config.to_dict()["strategy"]
        for key, value in {"bucket_mib": 50, "buffers": "none", "hook": "bf16"}.items():
            if key in options:
                assert options[key] == value
                assert not any(key in line for line in said)
            else:
                assert key in said[0]
                assert f"means nothing under {strategy}" in said[0]
    assert said, "offload has no such option"
