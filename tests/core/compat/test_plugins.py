"""Plugin objects of Accelerate choose the strategy that their file would choose."""

from functools import partial

import accelerate as real
import pytest
import torch
from torch.distributed.fsdp import CPUOffload, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from drivetrain.compat import accelerate as ours
from drivetrain.compat.accelerator import translated
from drivetrain.errors import ConfigError, UsageError


def strategy_of(*plugins):
    return translated(plugins).values["strategy"]


def test_plugins_of_engines_become_strategies():
    assert strategy_of(ours.DeepSpeedPlugin()) == {"name": "zero2"}
    assert strategy_of(ours.DeepSpeedPlugin(zero_stage=0)) == {"name": "ddp"}
    plugin = ours.DeepSpeedPlugin(zero_stage=3, offload_optimizer_device="cpu")
    assert strategy_of(plugin) == {"name": "zero3", "offload": {"optimizer": "cpu"}}
    config = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}
    values = translated([ours.DeepSpeedPlugin(config)]).values
    assert (values["strategy"], values["precision"]) == ({"name": "zero1"}, "bf16")

    policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={torch.nn.Linear})
    plugin = ours.FullyShardedDataParallelPlugin(
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        cpu_offload=CPUOffload(offload_params=True),
        auto_wrap_policy=policy,
        limit_all_gathers=True,
    )
    assert strategy_of(plugin) == {
        "name": "fsdp",
        "reshard_after_forward": False,
        "units": "class",
        "unit_classes": "Linear",
        "offload": {"optimizer": "cpu", "params": "cpu"},
    }
    assert strategy_of(ours.FullyShardedDataParallelPlugin(2)) == {"name": "fsdp"}
    numbers = [ours.FullyShardedDataParallelPlugin(1, number) for number in (1, 2)]
    assert [strategy_of(each).get("reshard_after_forward") for each in numbers] == [None, False]

    expected = {"name": "megatron", "tp": 2, "data_parallel": {"name": "ddp"}}
    assert strategy_of(ours.MegatronLMPlugin(2, 1)) == expected
    assert strategy_of(ours.utils.TorchTensorParallelPlugin(2)) == expected
    both = (ours.FullyShardedDataParallelPlugin(2), ours.ParallelismConfig(tp_size=2))
    assert strategy_of(*both) == expected | {"data_parallel": {"name": "fsdp"}}


def test_settings_without_meaning_are_one_clear_line():
    for plugins, error, message in (
        ([ours.DeepSpeedPlugin(zero_stag=2)], ConfigError, "unknown key .*zero_stag.*zero_stage"),
        ([ours.DeepSpeedPlugin(zero_stage=7)], ConfigError, "a stage from 0 to 3, found 7"),
        (
            [ours.FullyShardedDataParallelPlugin(ignored_modules=["head"])],
            UsageError,
            "expected no ignored_modules .* every parameter is divided",
        ),
        (
            [ours.ParallelismConfig(dp_shard_size=2, cp_size=2)],
            UsageError,
            "expected no cp_size in ParallelismConfig, found 2; no ranks share a sequence here",
        ),
        (
            [ours.DeepSpeedPlugin(), ours.FullyShardedDataParallelPlugin()],
            UsageError,
            r"one engine, found \['DEEPSPEED', 'FSDP'\]",
        ),
    ):
        with pytest.raises(error, match=message) as raised:
            translated(plugins)
        assert "\n" not in str(raised.value)


def test_sizes_of_axes_have_the_answers_of_accelerate(monkeypatch):
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "3")
    for sizes in ({}, {"tp_size": 2}, {"dp_replicate_size": 2, "cp_size": 4}):
        mine, theirs = ours.ParallelismConfig(**sizes), real.ParallelismConfig(**sizes)
        for name in (*dir(real.ParallelismConfig), *vars(theirs)):
            if name[0] != "_" and name.endswith(("_size", "_enabled", "_names", "_dims")):
                assert getattr(mine, name) == getattr(theirs, name), name
    for name in ("cp_size", "sp_size", "tp_size", "dp_shard_size", "dp_replicate_size"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1"):
            real.ParallelismConfig(**{name: 0})
        with pytest.raises(UsageError, match=f"a {name} of at least 1 in Par.*, found 0"):
            ours.ParallelismConfig(**{name: 0})
    found = strategy_of(ours.FullyShardedDataParallelPlugin(), ours.ParallelismConfig(2))
    assert found == {"name": "fsdp", "sharding": "hybrid", "shard_size": 3}


@pytest.mark.ranks(2)
def test_a_mesh_of_axes_has_their_joint_axes():
    assert ours.ParallelismConfig().build_device_mesh("cpu") is None
    mesh = ours.ParallelismConfig(dp_shard_size=2).build_device_mesh("cpu")
    assert mesh.mesh_dim_names == ("dp_shard",)
    with pytest.warns(UserWarning, match="flattened"):
        assert mesh["dp"].size() == mesh["dp_cp"].size() == 2


def test_an_accelerator_takes_them_and_says_what_has_no_effect(monkeypatch, caplog):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    plugin = ours.DeepSpeedPlugin(zero_stage=1, gradient_accumulation_steps=4)
    with caplog.at_level("INFO"):
        options = {"gradient_accumulation_steps": 2, "deepspeed_plugin": {"one": plugin}}
        accelerator = ours.Accelerator(cpu=True, **options)
    assert accelerator.mixed_precision == "no"
    assert "ACCELERATE_MIXED_PRECISION in the environment: no effect" in caplog.text
    assert "gradient_accumulation_steps=2 and 4 of the plugin object differ" in caplog.text
    assert accelerator.config.strategy == "zero1"
    assert accelerator.gradient_accumulation_steps == 4
    assert accelerator.state.deepspeed_plugin is plugin
    assert "optimizer" not in accelerator.state.deepspeed_plugin.deepspeed_config
    assert accelerator.state.fsdp_plugin is None
    with pytest.raises(UsageError, match="keep one"):
        ours.Accelerator(strategy="ddp", deepspeed_plugin=plugin)


def test_models_are_compiled_as_a_plugin_says(monkeypatch):
    made = []
    monkeypatch.setattr(torch, "compile", lambda model, **how: made.append(how) or model)
    plugin = ours.TorchDynamoPlugin("EAGER", fullgraph=True, dynamic=False)
    accelerator = ours.Accelerator(cpu=True, dynamo_plugin=plugin)
    accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.prepare_model(torch.nn.Linear(2, 2))
    how = {"backend": "eager", "mode": None, "fullgraph": True, "dynamic": False, "options": None}
    assert made == [how, how]
    ours.Accelerator(cpu=True, dynamo_backend="no").prepare(torch.nn.Linear(2, 2))
    assert len(made) == 2


def test_regional_compilation_compiles_the_blocks():
    plugin = ours.TorchDynamoPlugin("inductor", use_regional_compilation=True)
    accelerator = ours.Accelerator(cpu=True, dynamo_plugin=plugin)
    assert accelerator.config.run.compile == "blocks"
    with pytest.raises(UsageError, match="expected backend='inductor' without mode"):
        ours.Accelerator(
            cpu=True,
            dynamo_plugin=ours.TorchDynamoPlugin("eager", "x", use_regional_compilation=True),
        )
    with pytest.raises(UsageError, match="write compile: blocks into the file"):
        ours.Accelerator(cpu=True, dynamo_plugin=plugin, config="run.yaml")
