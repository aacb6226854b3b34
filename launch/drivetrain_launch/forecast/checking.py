"""Refuses a configuration that no run can have: before a model, a rank, and an import of torch."""

import sys
from pathlib import Path

from drivetrain.config import RunConfig
from drivetrain.config.outline import FarLinks, check_axes, check_forward, find_outline
from drivetrain.config.policy import Policy
from drivetrain.config.resolve import Resolved
from drivetrain.config.schema import FarConfig
from drivetrain.errors import ConfigError
from drivetrain_launch.ranks.placement import check_hosts, check_size


def check_run(resolved: Resolved) -> None:
    """Check a resolved configuration against the strategy, its dtypes, the ranks and the hosts.

    The machine is not looked at: the file may be for another one. So ``nproc_per_node: auto``
    leaves the number of ranks open.

    Raises:
        ConfigError: settings that ``prepare()``, or the launcher, would refuse.
    """
    check_hosts(resolved.run.launch)
    if resolved.run.profile.steps != "":
        from drivetrain.observe.profile import StepWindow

        StepWindow.parse(resolved.run.profile.steps)
    kind, options = find_outline(resolved.strategy, resolved.strategy_config)
    precision = _policy(resolved.run)
    kind.check_options(options, precision)
    kind.check_links(options, _links(resolved.run), precision)
    settings = resolved.run.launch
    if settings.nproc_per_node == "auto":
        return
    for hosts in range(settings.nnodes, settings.least_nnodes - 1, -1):
        size = check_size(settings.nproc_per_node, hosts)
        try:
            _check_islands(resolved.run.links.hardware, settings.nproc_per_node, hosts)
            sizes = kind.axes(options, size)
            check_axes(sizes, size)
            check_forward(resolved.run, sizes)
        except ConfigError as error:
            if hosts == settings.nnodes:
                raise
            raise ConfigError(
                f"launch.min_nnodes: the run could not go on with {hosts} hosts of "
                f"{settings.nproc_per_node} ranks: {error}"
            ) from error


def _policy(run: RunConfig) -> Policy:
    """Return the dtypes; as ``prepare()`` has them where a plugin without outline brought torch."""
    if "torch" not in sys.modules:
        return Policy.configured(run)
    from drivetrain.runtime.precision import Precision

    return Precision.configured(run)


def _links(run: RunConfig) -> FarLinks:
    """Return the methods for slow links: they compute with torch, so it is imported for them."""
    if run.links.far == FarConfig() and "torch" not in sys.modules:
        return FarLinks()
    from drivetrain.compression.methods import LinkMethods

    return LinkMethods.configured(run.links, undoable=run.skips_steps)


def _check_islands(hardware: str, ranks: int, nodes: int) -> None:
    """Refuse islands that do not fit the hosts; a file of them may lie on the hosts alone.

    Islands are declared in a world, which has devices of torch.
    """
    if not hardware:
        return
    from drivetrain.compression.communicator import declared_islands
    from drivetrain.hardware.description import names_a_device
    from drivetrain_launch.forecast.planning import planned_world

    if names_a_device(hardware) or Path(hardware).exists():
        declared_islands(planned_world(ranks, nodes), hardware)
