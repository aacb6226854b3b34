"""The strategy ``ddp`` by itself, without an accelerator around it."""

from torch import nn

from drivetrain.cost import Traffic
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.world import World
from drivetrain.strategy import Run
from drivetrain_ddp.options import DdpConfig
from drivetrain_ddp.strategy import Ddp

SMALL = DdpConfig(bucket_mib=0.001, first_bucket_mib=0.001)


def start(model: nn.Module, config: DdpConfig = SMALL, optimizers: tuple = ()) -> Ddp:
    """Prepare a model and its optimizers."""
    world = World.discover(cpu=True)
    run = Run(
        world=world,
        mesh=Mesh.build(Ddp.axes(config, world.size), world),
        precision=Precision.of("no"),
        accumulation=1,
        traffic=Traffic(),
    )
    strategy = Ddp(config, run)
    strategy.prepare(model, optimizers)
    return strategy
