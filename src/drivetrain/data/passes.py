"""Passes over one loader: each reads an epoch, and one of them has the loader's position."""

from dataclasses import dataclass, field
from typing import Any

from drivetrain.data.marks import Marks
from drivetrain.data.rows import Rows
from drivetrain.data.steps import RankBatch, Start

BESIDE = 2_654_435_761
"""Between the seeds of passes that are under way together; those of epochs are neighbours."""


@dataclass(slots=True)
class Progress:
    """The position of a loader; shared with the loaders that skip batches on its behalf.

    Attributes:
        seed: the run's seed.
        epoch: the epoch that is being read, or that is read next.
        start: where in that epoch the next pass starts; None for its beginning.
        passes: those under way.
        leader: the one of them whose position is that of the loader.
        latest: the pass that leads, or was the last to lead.
        turn: the pass that delivered last.
        left: the pass that was left before all ranks had used a batch of it.
        marks: where the loader was before windows.
    """

    seed: int
    epoch: int = 0
    start: Start | None = None
    passes: list["Pass"] = field(default_factory=list)
    leader: "Pass | None" = None
    latest: "Pass | None" = None
    turn: "Pass | None" = None
    left: "Pass | None" = None
    marks: Marks = field(default_factory=Marks)

    def lead(self, one: "Pass") -> None:
        """Let the position of a pass be that of the loader."""
        self.leader = self.latest = one
        self.left = None

    def beside(self, leader: "Pass") -> Start:
        """Return the start of one more pass, with an order of its own."""
        seed = (leader.start.seed + len(self.passes) * BESIDE) % 2**63
        return Start(epoch=self.epoch, seed=seed, aside=True)

    def deliver(self, one: "Pass") -> None:
        """Note that a pass delivers; it leads where the leader stands still beside a training."""
        if one.used and self.turn is one:
            self.lead(one)
        self.turn = one

    def end(self, one: "Pass", *, finished: bool, alone: bool) -> None:
        """End a pass, and move to the next epoch unless it was a look.

        Args:
            one: the pass.
            finished: whether it came to its end.
            alone: whether no other rank can have another view of it.
        """
        self.passes.remove(one)
        shared = one.used or alone
        if finished and shared and self.leader is not None and self.turn is one:
            self.lead(one)
        if self.leader is not one:
            return
        self.leader = None
        if finished or shared:
            self.move_on(one)
        else:
            self.left = one

    def stop(self) -> list["Pass"]:
        """End all passes without a trace, and return them."""
        stopped, self.passes = self.passes, []
        self.leader = self.left = None
        for one in stopped:
            one.stopped = True
        return stopped

    def move_on(self, one: "Pass") -> None:
        """Go to the epoch after a pass, unless set_epoch() has chosen one."""
        self.start = self.left = None
        self.epoch += self.epoch == one.epoch


@dataclass(eq=False, slots=True)
class Pass:
    """One pass over a loader, from the first batch that is asked for to its end or ``break``.

    Attributes:
        loader: the prepared loader.
        progress: of the loader.
        epoch: that it reads.
        start: where the next step starts.
        ends: whether the batch at hand is this rank's last.
        remainder: see PreparedLoader.
        rows: of the batch at hand; None where no batch repeats samples.
        first: of its first batch.
        total: of all batches so far.
        evaluates: whether a model has run without gradients on its batches.
        trains: whether a backward has followed on one of them.
        used: whether all ranks together have used a batch.
        stopped: whether load_state_dict() has ended it.
    """

    loader: Any
    progress: Progress
    epoch: int
    start: Start
    ends: bool = False
    remainder: int = -1
    rows: Rows | None = None
    first: Rows | None = None
    total: Rows = Rows(0, 0)
    evaluates: bool = False
    trains: bool = False
    used: bool = False
    stopped: bool = False

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch at hand is this rank's last of the epoch."""
        return self.ends

    def note(self, share: RankBatch) -> None:
        """Note the facts of the batch at hand."""
        self.ends, self.rows = share.last, share.rows
        if share.rows is not None:
            self.first = self.first or share.rows
            self.total = Rows(
                self.total.whole + share.rows.whole, self.total.real + share.rows.real
            )

    def use(self, *, trains: bool) -> None:
        """Note that all ranks together have used a batch, so that all have begun this pass."""
        self.used = True
        self.trains = self.trains or trains
        if self.progress.left is self:
            self.progress.move_on(self)
