"""Offloaded state on paper: transfers over the bus and to the disk, and updates on the host.

Gradients go to the host when a step is taken; the processor updates unit by unit, and the next
forward waits for each of its units (Ren et al. 2021, arXiv 2101.06840, section 4.2; Rajbhandari et
al. 2021, arXiv 2104.07857, section 5). A step on paper begins with the updates of the step before.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from drivetrain.paper.run import BytesPerElement
from drivetrain.paper.step import PaperTask
from drivetrain.paper.work import HostPass, Operation, PaperUnit, TierCopy

TO_HOST, HOST, DISK, FROM_HOST = "to the host", "host", "disk", "from the host"
"""Lanes beside those of compute and of axes; the bus carries both directions at once."""

STORE_LANES = frozenset((TO_HOST, HOST, DISK, FROM_HOST))

STATE = 12
"""Bytes of masters and moments; gradients that wait beside a master are no state of a store."""

Tier: TypeAlias = Literal["", "cpu", "nvme"]
"""Where state lies: on the device, in host memory, on a disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """State in stores between its uses.

    Attributes:
        optimizer: where the optimizer's state lies.
        parameters: where this rank's share of divided parameters lies.
        share: of the parameters whose optimizer state is stored.
        delayed: whether forward does not wait for updates, and uses values of one step before.
    """

    optimizer: Tier = ""
    parameters: Tier = ""
    share: float = 1.0
    delayed: bool = False

    @property
    def part(self) -> float:
        """Share of the optimizer's state that is not on the device."""
        return self.share if self.optimizer else 0.0

    def update(
        self, unit: PaperUnit, elements: float, each: BytesPerElement, first: int
    ) -> list[PaperTask]:
        """Return the update of this rank's share of a unit; the last task brings new values.

        Args:
            unit: for names.
            elements: of this rank's share whose state is stored.
            each: bytes of an element.
            first: the index in the step of the first task.
        """
        state = elements * min(STATE, each.optimizer)
        moved = elements * (each.gradient + each.parameter)
        chain: list[tuple[str, str, Operation]] = [
            ("gradients of", TO_HOST, TierCopy("bus", elements * each.gradient)),
            ("read", DISK, TierCopy("disk", state)),
            ("update", HOST, HostPass(2 * state + moved)),
            ("write", DISK, TierCopy("disk", state)),
            ("values of", FROM_HOST, TierCopy("bus", elements * each.parameter)),
        ]
        if self.optimizer != "nvme":
            chain = [link for link in chain if link[1] != DISK]
        return list(_tasks(chain, unit.name, first))

    def fetch(self, unit: PaperUnit, nbytes: float, first: int) -> list[PaperTask]:
        """Return the tasks that bring this rank's share of a unit's parameters to the device."""
        chain: list[tuple[str, str, Operation]] = [("fetch", FROM_HOST, TierCopy("bus", nbytes))]
        if self.parameters == "nvme":
            chain.insert(0, ("read", DISK, TierCopy("disk", nbytes)))
        return list(_tasks(chain, unit.name, first)) if self.parameters else []

    def held(self, optimizer: float, gradients: float, parameters: float) -> Mapping[str, float]:
        """Return the bytes that a rank keeps in host memory and on the disk.

        Args:
            optimizer: bytes of this rank's share of the optimizer's state.
            gradients: of its gradients.
            parameters: of its parameters.
        """
        found = {"cpu": self.part * gradients, "nvme": 0.0, "": 0.0}
        found[self.optimizer] += self.part * optimizer
        found[self.parameters] += parameters
        return {"host": found["cpu"], "disk": found["nvme"]}


def _tasks(chain: list[tuple[str, str, Operation]], name: str, first: int) -> Iterator[PaperTask]:
    for index, (verb, lane, operation) in enumerate(chain):
        after = (first + index - 1,) if index else ()
        yield PaperTask(f"{verb} {name}", (operation,), lane, after)
