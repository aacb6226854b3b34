"""``launch --dry-run``: the resolved configuration, the mesh, and the cost on a rank."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from drivetrain.compression.automatic import Sender, choose_links
from drivetrain.config.resolve import Resolved
from drivetrain.cost import Cost, ModelSpec
from drivetrain.errors import ConfigError
from drivetrain.hardware.description import load_hardware
from drivetrain.hardware.sizes import size_text
from drivetrain.planner.search import HostOrder, HostPlacement
from drivetrain.strategy import Run, find_strategy
from drivetrain_launch.commands.config import show_configuration
from drivetrain_launch.console import listed, say, show_table
from drivetrain_launch.forecast import EXAMPLE, example_model, plan, plan_on
from drivetrain_launch.ranks.placement import accelerators, cores, local_ranks
from drivetrain_launch.ranks.remote import RemoteHost


def preview(resolved: Resolved, hosts: Sequence[RemoteHost] = ()) -> None:
    """Print the three tables; nothing is started.

    Args:
        resolved: the configuration.
        hosts: to start over ssh, in the order of their ranks.

    Raises:
        ConfigError: the strategy does not fit this number of ranks.
    """
    run, shape = _planned(resolved, hosts)
    kind, options = find_strategy(resolved.strategy, resolved.strategy_config)
    model = example_model()
    run, lines = foresee_links(resolved, run, model)
    cost = kind.cost(options, model, run)
    show_configuration(resolved, every=False)
    note = run.links.note(kind.channels(options))
    for line in lines:
        print(f"{line}\n")
    show_table(
        f"Mesh: {run.mesh} ({shape}){note}",
        ("axis", "size", "ranks of the first line", "crosses hosts"),
        [
            (axis.name, str(axis.size), listed(axis.ranks), "yes" if axis.spans_hosts else "no")
            for axis in run.mesh.values()
        ],
    )
    show_table(
        f"Cost of a model of {EXAMPLE}, on rank 0", ("what", "amount"), list(_cost_rows(cost))
    )
    if run.world.spans_hosts:
        show_placement(cost, run)


def _planned(resolved: Resolved, hosts: Sequence[RemoteHost]) -> tuple[Run, str]:
    """Return the run as rank 0 will see it, and the numbers of ranks in words."""
    settings = resolved.run.launch
    if hosts:
        counts = " + ".join(map(str, ranks_of(hosts, resolved)))
        return _plan_listed(resolved, hosts), f"{counts} ranks"
    if settings.nproc_per_node != "auto":  # perhaps of other machines than this one
        ranks = settings.nproc_per_node
    else:
        available = 0 if settings.device == "cpu" else accelerators()
        ranks = local_ranks(settings, accelerators=available, cores=cores())
        print(
            f"The number of ranks is open, launch.nproc_per_node: auto: planned are the {ranks} of "
            "a host like this machine; --nproc-per-node, --nnodes or --hosts plan others.\n"
        )
    return plan(resolved, ranks), f"{settings.nnodes} x {ranks} ranks"


def _plan_listed(resolved: Resolved, hosts: Sequence[RemoteHost]) -> Run:
    counts = ranks_of(hosts, resolved)
    names = [host.name for host, count in zip(hosts, counts, strict=True) for _ in range(count)]
    return plan_on(resolved, names)


def foresee_links(resolved: Resolved, run: Run, model: ModelSpec) -> tuple[Run, list[str]]:
    """Return the run with the methods that ``links.far: auto`` would choose here, and the reasons.

    The rate of the link must be declared, and the time of encodings is this host's. Where ranks
    compute on accelerators nothing is timed: the run then stays open, and its traffic exact.
    """
    auto, settings = run.links.auto, resolved.run.launch
    if auto is None or not run.world.spans_hosts:
        return run, []
    on_cpu = settings.device == "cpu" or not accelerators()
    if not auto.mbit_per_s or not on_cpu:
        missing = "the encodings on the accelerators" if auto.mbit_per_s else "links.mbit_per_s"
        return run, [
            f"links.far: auto cannot be foreseen without {missing}: all bytes below are those of "
            "exact traffic; a line at prepare() names the methods, which can be pinned then"
        ]
    kind, options = find_strategy(resolved.strategy, resolved.strategy_config)
    sender = Sender(kind, options, run.precision)
    links, lines = choose_links(run.links, sender, model.parameters, run.world)
    return replace(run, links=links), [f"{line}, as encoded on this host" for line in lines]


def show_placement(cost: Cost, run: Run) -> None:
    """Print which ranks lie on which host, and the bytes over each link in a step."""
    hosts = run.world.islands
    places = [(host, tuple(r for r, name in enumerate(hosts) if name == host))
              for host in dict.fromkeys(hosts)]  # fmt: skip
    show_table("Ranks", ("host", "ranks"), [(host, listed(ranks)) for host, ranks in places])
    rows = [
        (f"{operation} over {name}", *_link(run, name, sent))
        for (name, operation), sent in cost.sent.items()
    ]
    rows += [(f"{what} over {axis}", *_link(run, axis, None)) for axis, what in
             cost.uncounted.items()]  # fmt: skip
    show_table("Links, in a step", ("what", "link", "a rank sends", "leaves a host"), rows)


def _link(run: Run, name: str, sent: int | None) -> tuple[str, str, str]:
    """Return the link of an axis, the bytes that a rank sends, and the bytes that leave a host."""
    line = run.mesh.line(name)
    link = "between hosts" if line.spans_hosts else "inside of a host"
    if sent is None:
        return link, "depends on the batch", "depends on the batch" if line.spans_hosts else "0 B"
    return link, size_text(sent), size_text(run.bytes_between_hosts({(name, ""): sent}))


def _cost_rows(cost: Cost) -> Iterator[tuple[str, str]]:
    for kind, count in cost.held.items():
        yield f"held: {kind}", size_text(count)
    yield "held: total", size_text(cost.total_held)
    for (axis, operation), count in cost.sent.items():
        yield f"sent per step: {operation} over {axis}", size_text(count)
    for axis, what in cost.uncounted.items():
        yield f"sent per step: {what} over {axis}", "not counted: depends on the batch"
    if not cost.uncounted:
        yield "sent per step: total", size_text(cost.total_sent)
    elif cost.sent:
        yield "sent per step: total of what is counted", size_text(cost.total_sent)


# --- the order of listed hosts by measured links, for ``drivetrain launch --topology`` ---


def hosts_in_order(
    hosts: Sequence[RemoteHost], resolved: Resolved, topology: str
) -> list[RemoteHost]:
    """Return hosts in the order in which messages are quickest, and print a line about it.

    Args:
        hosts: as the user listed them.
        resolved: the configuration: its strategy says which ranks talk.
        topology: a description with measured rates between these hosts.

    Raises:
        ConfigError: no hosts are listed, there are no such rates, or the number of ranks of a host
            is not known.
    """
    if not hosts:
        raise ConfigError(
            "--topology orders the hosts of --hosts or --hostfile, found neither; give one of "
            "them, or choose each host's --node-rank yourself"
        )
    pairs = load_hardware(topology).links.pairs
    if pairs is None:
        raise ConfigError(
            f"--topology {topology}: expected rates between hosts, links.pairs, found none; run "
            "`drivetrain hardware measure` on all hosts"
        )
    kind, options = find_strategy(resolved.strategy, resolved.strategy_config)
    run = _plan_listed(resolved, hosts)
    sent: Counter[str] = Counter()
    for (axis, _), nbytes in kind.cost(options, example_model(), run).sent.items():
        sent[axis.partition(".")[0]] += nbytes
    sizes = {axis.name: axis.size for axis in run.mesh.values()}
    names, slots = [host.name for host in hosts], ranks_of(hosts, resolved)
    placement = HostPlacement(names, slots, sizes, sent, pairs)
    best = placement.best()
    say(told(placement, placement.given(), best))
    return [hosts[index] for index in best.hosts]


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
