"""Everything that can be refused before ranks start: the same errors as ``prepare()``, at once."""

from drivetrain.config.resolve import Resolved
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.world import World
from drivetrain.strategy import find_strategy
from drivetrain_launch.ranks.placement import check_hosts


def check_run(resolved: Resolved) -> None:
    """Check a resolved configuration against the strategy, its dtypes, the ranks and the hosts.

    The machine is not looked at: the file may be for another one. So ``nproc_per_node: auto``
    leaves the number of ranks open.

    Raises:
        ConfigError: settings that ``prepare()``, or the launcher, would refuse.
    """
    check_hosts(resolved.run.launch)
    kind, options = find_strategy(resolved.strategy, resolved.strategy_config)
    kind.check_options(options, Precision.configured(resolved.run))
    settings = resolved.run.launch
    if settings.nproc_per_node != "auto":
        world = planned_world(settings.nproc_per_node, settings.nnodes)
        Mesh.plan(kind.axes(options, world.size), world)


def planned_world(ranks: int, nodes: int) -> World:
    """Return the world of a run as rank 0 will see it, with as many ranks on each host."""
    hosts = tuple(f"host {host}" for host in range(nodes) for _ in range(ranks))
    return World(size=len(hosts), local_size=ranks, hosts=hosts)
