"""Everything that can be refused before ranks start: the same errors as ``prepare()``, at once."""

from pathlib import Path

from drivetrain.config.resolve import Resolved
from drivetrain.errors import ConfigError
from drivetrain.hardware.catalog import names_a_device
from drivetrain.links.chosen import LinkMethods
from drivetrain.links.islands import declared_islands
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.precision import Precision
from drivetrain.strategy import find_strategy
from drivetrain_launch.forecast.planning import planned_world
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
    links = LinkMethods.configured(resolved.run.links, undoable=resolved.run.skips_steps)
    kind.check_links(options, links, Precision.configured(resolved.run))
    settings = resolved.run.launch
    if settings.nproc_per_node == "auto":
        return
    hardware = resolved.run.links.hardware  # a file may lie on the hosts of the run alone
    described_here = names_a_device(hardware) or Path(hardware).exists()
    for hosts in range(settings.nnodes, settings.least_nnodes - 1, -1):
        world = planned_world(settings.nproc_per_node, hosts)
        try:
            if described_here:
                world = declared_islands(world, hardware)
            Mesh.plan(kind.axes(options, world.size), world)
        except ConfigError as error:
            if hosts == settings.nnodes:
                raise
            raise ConfigError(
                f"launch.min_nnodes: the run could not go on with {hosts} hosts of "
                f"{settings.nproc_per_node} ranks: {error}"
            ) from error
