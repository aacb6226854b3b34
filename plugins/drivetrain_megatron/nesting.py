"""The data-parallel strategy inside of a cell, found by name, and which ranks make a cell."""

from typing import Any

from drivetrain.errors import ConfigError
from drivetrain.runtime.mesh import Mesh
from drivetrain.strategy import Strategy, find_strategy
from drivetrain_megatron.config import MegatronConfig


def data_parallel(config: MegatronConfig) -> tuple[type[Strategy[Any]], Any]:
    """Return the class of the data-parallel strategy and its options.

    Raises:
        ConfigError: it is not installed, or is none: it lays ranks out on other axes than ``dp``.
    """
    name = config.data_parallel.name
    kind, options = find_strategy(name, config.data_parallel.options)
    axes = set(kind.axes(options, 1))
    if axes != {"dp"}:
        raise ConfigError(
            f"strategy.data_parallel: expected a strategy over the axis dp alone, found {name!r} "
            f"over {', '.join(sorted(axes))}; name one that replicates or shards a whole model"
        )
    return kind, options


def advice(mesh: Mesh) -> str:
    """Return what is wrong with how axes lie on hosts; empty if nothing is.

    Tensor parallelism waits for its neighbors several times in each block, pipelines once per
    stage, data parallelism once per step: the first belongs inside of a host (Narayanan et al.
    2021, section 3.2, takeaway 1).
    """
    line = mesh["tp"]
    if not line.spans_hosts:
        return ""
    hosts = {host: line.hosts.count(host) for host in line.hosts}
    where = ", ".join(f"{count} on {host}" for host, count in hosts.items())
    return (
        f"tensor-parallel ranks lie on {len(hosts)} hosts ({where}): every block waits for the "
        "network between them; put tp first in order, and set tp to at most the ranks of a host"
    )
