"""``notebook_launcher`` with Accelerate's arguments."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from drivetrain import notebook
from drivetrain.errors import UsageError


def notebook_launcher(  # noqa: PLR0913, PLR0917 - the arguments of Accelerate
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Any = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> None:
    """Run a function on several processes of this host and wait for all of them.

    The processes meet in a file: addresses, ports and names of a rendezvous have no effect.

    Args:
        function: called with ``args`` in every process.
        args: positional arguments.
        num_processes: number of processes; None takes one per accelerator, or per core without.
        mixed_precision: ``no`` leaves it to the launch configuration.
        use_port: without effect.
        master_addr: without effect.
        node_rank: without effect.
        num_nodes: number of hosts, 1.
        rdzv_backend: without effect.
        rdzv_endpoint: without effect.
        rdzv_conf: without effect.
        rdzv_id: without effect.
        max_restarts: how often all processes start again after one has failed.
        monitor_interval: without effect: a failure is seen at once.
        log_line_prefix_template: without effect.

    Raises:
        UsageError: several hosts.

    Other errors are those of ``drivetrain.notebook_launcher``.
    """
    del use_port, master_addr, node_rank, rdzv_backend, rdzv_endpoint, rdzv_conf, rdzv_id
    del monitor_interval, log_line_prefix_template
    if num_nodes != 1:
        raise UsageError(
            f"expected notebook_launcher to start one host, found num_nodes={num_nodes}; write the "
            "function to a script, and take 'drivetrain launch' with --nnodes"
        )
    precision = None if mixed_precision == "no" else str(mixed_precision)
    for restarts in range(max_restarts + 1):
        try:
            notebook.notebook_launcher(function, args, num_processes, mixed_precision=precision)
        except (ProcessRaisedException, ProcessExitedException):
            if restarts == max_restarts:
                raise
        else:
            return
