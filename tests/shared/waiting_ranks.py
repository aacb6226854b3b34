"""States of ranks that are made up: what they wait in, and for how long."""

from drivetrain_launch.ranks.answers import OperationView, RankView


def operation(
    submitted: int = 9, running: int = 9, seconds: float = 0.0, **facts: object
) -> OperationView:
    """Return an operation that two ranks have submitted, and that runs on this rank."""
    usual = {"place": "ring", "ranks": (0, 1), "checksum": 0, "name": "all_reduce", "size": ""}
    return OperationView(submitted=submitted, running=running, running_s=seconds, **usual | facts)


def view(rank: int, *operations: OperationView, **facts: object) -> RankView:
    """Return a rank of one host that is in its forward."""
    usual = {"host": "n1", "pid": 7, "section": "forward"}
    return RankView(rank=rank, operations=operations, **usual | facts)
