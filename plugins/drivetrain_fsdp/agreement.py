"""What a user's function chooses is compared over ranks before anything is cut accordingly."""

from collections.abc import Callable, Sequence

from drivetrain.communication import gather_object
from drivetrain.errors import RankMismatchError
from drivetrain.runtime.mesh import Axis


def agreed_keys(
    choose: Callable[[], list[str]], names: Sequence[str], function: str, axis: Axis
) -> list[str]:
    """Return the key of the unit that each parameter belongs to, in order. Collective.

    Args:
        choose: returns what this rank's call of the function means.
        names: the parameters.
        function: the function's path, for errors.
        axis: the ranks that must agree.

    Raises:
        RankMismatchError: on every rank, when keys differ or only others could choose.
        Exception: what this rank's function raised.
    """
    failure: Exception | None = None
    keys: list[str] = []
    try:
        keys = choose()
    except Exception as error:
        failure = error  # raised below, when the other ranks know
    told = gather_object({"keys": keys, "failure": str(failure) if failure else ""}, group=axis)
    if failure is not None:
        raise failure
    expected = f"expected {function} to choose the same units on every rank, found "
    for rank, other in zip(axis.ranks, told, strict=True):
        if other["failure"]:
            raise RankMismatchError(
                f"{expected}that it failed on rank {rank}: {other['failure']}; see that rank's "
                "own error"
            )
        for name, first, key in zip(names, told[0]["keys"], other["keys"], strict=True):
            if first != key:
                raise RankMismatchError(
                    f"{expected}{name!r} in {first or 'the rest of the model'} on rank "
                    f"{axis.ranks[0]} and in {key or 'the rest of the model'} on rank {rank}; let "
                    "it depend on nothing but the model"
                )
    return keys
