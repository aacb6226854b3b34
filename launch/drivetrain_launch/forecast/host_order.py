"""The order of listed hosts by measured links, for ``drivetrain launch --topology``."""

from collections import Counter
from collections.abc import Sequence

from drivetrain.config.resolve import Resolved
from drivetrain.errors import ConfigError
from drivetrain.hardware.catalog import load_hardware
from drivetrain.planner.placement import HostOrder, HostPlacement
from drivetrain.strategy import find_strategy
from drivetrain_launch.forecast.planning import example_model, plan_on
from drivetrain_launch.hosts.remote import RemoteHost


def hosts_in_order(
    hosts: Sequence[RemoteHost], resolved: Resolved, topology: str
) -> tuple[list[RemoteHost], str]:
    """Return hosts in the order in which messages are quickest, and a line about it.

    Args:
        hosts: as the user listed them.
        resolved: the configuration: its strategy says which ranks talk.
        topology: a description with measured rates between these hosts.

    Raises:
        ConfigError: there are no such rates, or the number of ranks of a host is not known.
    """
    pairs = load_hardware(topology).links.pairs
    if pairs is None:
        raise ConfigError(
            f"--topology {topology}: expected rates between hosts, links.pairs, found none; run "
            "`drivetrain hardware measure` on all hosts"
        )
    slots = ranks_of(hosts, resolved)
    kind, options = find_strategy(resolved.strategy, resolved.strategy_config)
    run = plan_on(resolved, [name for host, count in zip(hosts, slots, strict=True)
                             for name in [host.name] * count])  # fmt: skip
    sent: Counter[str] = Counter()
    for (axis, _), nbytes in kind.cost(options, example_model(), run).sent.items():
        sent[axis.partition(".")[0]] += nbytes
    sizes = {axis.name: axis.size for axis in run.mesh.values()}
    placement = HostPlacement([host.name for host in hosts], slots, sizes, sent, pairs)
    given, best = placement.given(), placement.best()
    return [hosts[index] for index in best.hosts], told(placement, given, best)


def ranks_of(hosts: Sequence[RemoteHost], resolved: Resolved) -> list[int]:
    """Return the ranks of each host.

    Raises:
        ConfigError: a host decides itself.
    """
    common = resolved.run.launch.nproc_per_node
    found = [host.slots or (0 if common == "auto" else int(common)) for host in hosts]
    if not all(found):
        raise ConfigError(
            "expected a number of ranks for each host, found hosts that decide it themselves; "
            "write HOST:N, slots=N in the hostfile, or --nproc-per-node"
        )
    return found


def told(placement: HostPlacement, given: HostOrder, best: HostOrder) -> str:
    """Return a line about the chosen order."""
    names = ", ".join(placement.names[index] for index in best.hosts)
    if best.hosts == given.hosts:
        return f"hosts stay in the order {names}: no other is better by the measured links"
    return (
        f"hosts in the order {names}: a billion parameters' messages take {best.seconds:.3g} s on "
        f"the slowest links instead of {given.seconds:.3g} s, links between neighbors "
        f"{best.chain:.3g} s per GB instead of {given.chain:.3g} s"
    )
