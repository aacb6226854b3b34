"""The strategy ``offload`` is another one with a section set: in configurations and in runs."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from drivetrain import Accelerator
from drivetrain.config import Layer, NestedStrategy, resolve
from drivetrain.cost import ModelSpec
from drivetrain.errors import ConfigError, UnknownPluginError
from drivetrain.registry import strategies
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.world import World
from drivetrain.sharding.options import OffloadOptions
from drivetrain.strategy import Run, find_strategy
from drivetrain.traffic import Traffic
from drivetrain_fsdp import Fsdp
from drivetrain_launch.cli import run
from drivetrain_offload import Offload, OffloadConfig
from drivetrain_zero import Zero2, Zero3
from drivetrain_zero.options import Zero2Config, Zero3Config

ON_CPU = OffloadOptions(optimizer="cpu")


def resolved(**options):
    layer = Layer({"strategy": {"name": "offload", **options}})
    return resolve(layer, find_config=strategies().find_config)


def found(**options):
    made = resolved(**options)
    return find_strategy(made.strategy, made.strategy_config)


# --- configuration ---


def test_without_options_it_is_zero2_with_state_in_host_memory():
    assert strategies().load("offload") is Offload
    assert find_strategy("offload") == (Zero2, Zero2Config(offload=ON_CPU))
    assert found() == (Zero2, Zero2Config(offload=ON_CPU))


def test_options_go_where_they_belong():
    kind, options = found(
        optimizer="nvme",
        params="nvme",
        path="/mnt",
        delayed=True,
        store_options={"threads": 3},
        data_parallel={"name": "zero3", "keep_below": 7},
    )
    offload = OffloadOptions(
        optimizer="nvme",
        params="nvme",
        path="/mnt",
        delayed=True,
        store_options={"threads": 3},
    )
    assert (kind, options) == (Zero3, Zero3Config(keep_below=7, offload=offload))


@pytest.mark.parametrize("given", ["fsdp", {"name": "fsdp"}])
def test_any_strategy_with_the_section_is_composed(given):
    kind, options = found(data_parallel=given)
    assert kind is Fsdp
    assert options == replace(Fsdp.Config(), offload=ON_CPU)


def test_options_without_a_name_are_those_of_the_usual_one():
    assert found(data_parallel={"bucket_mib": 3}) == (
        Zero2,
        Zero2Config(bucket_mib=3, offload=ON_CPU),
    )


def test_what_is_shown_can_be_read_again():
    made = resolved(data_parallel={"name": "zero3"}, ratio=0.5)
    again = resolve(Layer(made.to_dict()), find_config=strategies().find_config)
    assert again.strategy_config == made.strategy_config
    assert made.to_dict()["strategy"]["data_parallel"]["name"] == "zero3"


@pytest.mark.parametrize("name", ["ddp", "megatron", "offload"])
def test_strategies_without_the_section(name):
    with pytest.raises(ConfigError, match=f"section offload, found '{name}'.* for example zero2"):
        found(data_parallel=name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": ""}, r"strategy\.optimizer: expected a store.*take the strategy zero2"),
        (
            {"data_parallel": {"name": "zero2", "offload": {"optimizer": "cpu"}}},
            r"strategy\.data_parallel\.offload: expected nothing",
        ),
        ({"data_parallel": {"bucket": 3}}, "did you mean 'bucket_mib'"),
        ({"ratio": 2.0}, "expected at most 1"),
        ({"params": "cpu"}, r"divides parameters.*offload\.params: cpu, found one that keeps"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ConfigError, match=message):
        found(**options)


def test_an_unknown_strategy():
    with pytest.raises(UnknownPluginError, match="'zero22'.*did you mean"):
        found(data_parallel="zero22")
    with pytest.raises(UnknownPluginError, match="'zero22'"):
        find_strategy("offload", OffloadConfig(data_parallel=NestedStrategy("zero22")))


def test_axes_and_cost_are_those_of_what_it_stands_for():
    world = World(size=4, local_size=4, hosts=("a",) * 4)
    kind, options = found(data_parallel="zero3")
    assert kind.axes(options, 4) == {"dp": 4}
    seen = Run(
        world=world,
        mesh=Mesh.plan({"dp": 4}, world),
        precision=Precision.of("no"),
        accumulation=2,
        traffic=Traffic(),
    )
    model = ModelSpec.of(nn.Linear(1000, 1000))
    theirs = Zero3.cost(Zero3Config(offload=ON_CPU), model, seen)
    assert kind.cost(options, model, seen) == theirs
    assert theirs.total_sent > 0


def test_it_is_composed_in_other_strategies():
    from drivetrain_megatron.cell import data_parallel
    from drivetrain_megatron.config import MegatronConfig

    config = MegatronConfig(data_parallel=NestedStrategy("offload"))
    assert data_parallel(config) == (Zero2, Zero2Config(offload=ON_CPU))


# --- the command ---


def launch(*arguments):
    return run(["launch", "--dry-run", "--cpu", "--strategy", "offload", *arguments, "train.py"])


def test_dry_run(capsys):
    assert launch() == 0
    shown = capsys.readouterr().out
    for text in ("strategy.name", "offload", "dp=", "held: total"):
        assert text in shown


def test_dry_run_of_what_cannot_be(capsys):
    assert launch("--set", "strategy.data_parallel=ddp") == ConfigError.exit_code
    assert "found 'ddp'" in capsys.readouterr().err


# --- runs ---


def train(strategy):
    accelerator = Accelerator(strategy=strategy, cpu=True)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(9, 40), nn.Tanh(), nn.Linear(40, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer = accelerator.prepare(model, optimizer)
    kind = type(accelerator.strategy_of(model))
    losses = []
    for step in range(4):
        torch.manual_seed(10 * step + accelerator.process_index)
        loss = model(torch.randn(5, 9)).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with accelerator.strategy_of(model).gathered(list(model.parameters())):
        values = [p.detach().clone() for p in model.parameters()]
    accelerator.end_training()
    accelerator.free_memory()
    return kind, losses, values


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (1, 2)])
@pytest.mark.parametrize("name", ["zero2", "fsdp"])
def test_training_is_that_of_the_strategy_it_composes(name, ranks):
    kind, losses, values = train({"name": "offload", "data_parallel": name})
    plain_kind, plain_losses, plain_values = train(name)
    assert kind is plain_kind
    assert losses == plain_losses
    assert losses[0] != losses[-1]
    for mine, theirs in zip(values, plain_values, strict=True):
        assert torch.equal(mine, theirs)
