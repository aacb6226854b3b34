"""The loader that the training loop iterates: epochs, passes, positions, and who hears of them.

Turns the user's loader into this rank's part of it.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from drivetrain import communication
from drivetrain.collectives.facts import size_of
from drivetrain.config import DataConfig
from drivetrain.data.division import (
    BatchDivision,
    EpochOrder,
    OrderDivision,
    SampleDivision,
    forward_epoch,
    generators,
)
from drivetrain.data.sources import (
    BatchSource,
    MapSource,
    OrderIdentity,
    RankBatch,
    Rows,
    Start,
    seed_of_main,
)
from drivetrain.data.streams import DispatchSource, IterableSource, StreamSource
from drivetrain.errors import CheckpointError, UsageError
from drivetrain.nested import send_to_device
from drivetrain.runtime import rng
from drivetrain.runtime.gradient_state import ActivePass, GradientState
from drivetrain.runtime.mesh import Axis
from drivetrain.runtime.world import World

# --- marks: a resumed run begins its accumulation window again ---


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a loader and all generators were before the first batch of an accumulation window.

    Attributes:
        window: its number.
        state, random: of the loader, as of ``state_dict``, and of the generators.
        at: time of the mark, on a clock of this process.
    """

    window: int
    state: dict[str, Any]
    random: rng.Snapshot = field(default_factory=rng.Snapshot)
    at: float = field(default_factory=time.perf_counter)


# --- passes: each reads an epoch, and one of them has the loader's position ---


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
        mark: where the loader was before the last window that it was read for.
    """

    seed: int
    epoch: int = 0
    start: Start | None = None
    passes: list["Pass"] = field(default_factory=list)
    leader: "Pass | None" = None
    latest: "Pass | None" = None
    turn: "Pass | None" = None
    left: "Pass | None" = None
    mark: Mark | None = None

    def mark_of(self, window: int) -> Mark | None:
        """Return where the loader was before a window; None if it has read nothing for it."""
        return self.mark if self.mark is not None and self.mark.window == window else None

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
        end_of_dataloader: whether the batch at hand is this rank's last.
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
    end_of_dataloader: bool = False
    remainder: int = -1
    rows: Rows | None = None
    first: Rows | None = None
    total: Rows = Rows(0, 0)
    evaluates: bool = False
    trains: bool = False
    used: bool = False
    stopped: bool = False

    def note(self, share: RankBatch) -> None:
        """Note the facts of the batch at hand."""
        self.end_of_dataloader, self.rows = share.last, share.rows
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


# --- random states of rank 0, given to all ranks ---


def synchronize_rng_states(
    rng_types: Sequence[str], generator: torch.Generator | None = None
) -> None:
    """Give every rank the generator states of rank 0; collective, does nothing with one rank.

    Args:
        rng_types: any of ``python``, ``numpy``, ``torch``, ``accelerator`` (or the accelerator's
            own name, as ``cuda``), and ``generator`` for the generator that is passed.
        generator: a CPU generator; without one, ``generator`` has nothing to do.

    Raises:
        UsageError: a type is unknown.
    """
    known = {"python", "numpy", "torch", "accelerator", "generator"}
    current = torch.accelerator.current_accelerator()
    aliases = {} if current is None else {current.type: "accelerator"}
    keys = [aliases.get(name, name) for name in rng_types]
    if not known.issuperset(keys):
        raise UsageError(
            f"expected rng_types among {sorted(known | set(aliases))}, found {list(rng_types)}"
        )
    if size_of(None) == 1:
        return
    state = rng.capture()
    rng.restore({key: communication.broadcast(state[key]) for key in keys if key in state})
    if "generator" in keys and generator is not None:
        generator.set_state(communication.broadcast(generator.get_state()))


# --- the loader ---


STATE_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """Work before and after each epoch and batch.

    Attributes:
        device: where batches go; None leaves them where they are.
        observer: the accumulation window, which ends with a loader's epoch, and is told of batches.
        rng_types: generators that rank 0 gives to all ranks when an epoch starts.
        fetching: is told the user's loader before each batch is read.
        exhausted: is told when there was none.
        delivered: turns each batch, on its device, into the one that the script gets.
        between: called when the script asks for another batch, before that is read.
        rank: index of this rank along the data-parallel axis.
        non_blocking: copy asynchronously.
        alone: whether no other rank reads, or nobody tells what ranks do together.
    """

    device: torch.device | None = None
    observer: GradientState | None = None
    rng_types: tuple[str, ...] = ()
    fetching: Callable[[DataLoader[Any]], None] | None = None
    exhausted: Callable[[], None] | None = None
    delivered: Callable[[Any], Any] | None = None
    between: Callable[[ActivePass], None] | None = None
    rank: int = 0
    non_blocking: bool = False
    alone: bool = True


class PreparedLoader(DataLoader[Any]):
    """A rank's part of a loader, which remembers epoch, order and position.

    It has the attributes of the user's loader (dataset, batch_size, collate_fn, ...), which cannot
    be changed through it. Each iteration is a pass of its own over one epoch; the next one reads
    the next epoch, also after a ``break``.

    A pass that begins while another one is under way is beside it: it has an order of its own, and
    position and epoch remain those of the first. So rank 0 alone may look at a batch, then or
    between two passes: a pass that is left before all ranks together have used a batch of it, by
    ``backward()`` or ``gather_for_metrics()``, changes nothing.

    Args:
        loader: the user's loader.
        source: reads the batches.
        progress: how far the loader is.
        delivery: work around each epoch and batch.
        skip_batches: batches to leave out of the first epoch, counted from its beginning.
    """

    def __init__(  # DataLoader's own is not called: there is no second set of its attributes
        self,
        loader: DataLoader[Any],
        source: BatchSource,
        progress: Progress,
        delivery: Delivery,
        skip_batches: int | None = None,
    ) -> None:
        self._user = loader
        self._source = source
        self._progress = progress
        self.mark_of = progress.mark_of
        self._delivery = delivery
        self._skip_batches = skip_batches

    def __getattr__(self, name: str) -> Any:
        if name == "_user":  # not set yet: unpickling or copying
            raise AttributeError(name)
        return getattr(self._user, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_user" in self.__dict__ and name in self._user.__dict__:
            raise UsageError(
                f"expected to find {name!r} of the loader unchanged, found an assignment to it "
                "after prepare(), which would have no effect; set it before"
            )
        object.__setattr__(self, name, value)

    def __len__(self) -> int:
        """Return the batches of this rank in a full epoch.

        Raises:
            TypeError: the dataset has no length.
        """
        progress = self._progress
        return self._source.batches(self._delivery.rank, progress.seed, progress.epoch)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names a private class
        return self._run()  # begins when the first batch is asked for

    @property
    def epoch(self) -> int:
        """The epoch that is being read, or that is read next."""
        return self._progress.epoch

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch at hand is this rank's last of the epoch."""
        latest = self._progress.latest
        return latest is not None and latest.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Real samples of the last global batch when it holds repetitions, else -1.

        Known from the first batch of an epoch on; with an iterable dataset, at its last batch.
        """
        latest = self._progress.latest
        return -1 if latest is None else latest.remainder

    @property
    def total_batch_size(self) -> int:
        """Samples of one step over all ranks.

        Raises:
            UsageError: the batch sampler makes batches of varying size.
        """
        size = self._source.division.total_batch_size
        if size is None:
            raise UsageError(
                "expected batches of one size, found a batch sampler without batch_size; give it "
                "that attribute"
            )
        return size

    @property
    def total_dataset_length(self) -> int:
        """Samples of the whole dataset; TypeError when it has no length."""
        return len(self._user.dataset)  # type: ignore[arg-type]

    @property
    def is_dispatched(self) -> bool:
        """Whether rank 0 alone reads, and sends to the others."""
        return self._source.is_dispatched

    @property
    def even_batches(self) -> bool:
        """Whether the last step is filled up so that every rank has a full batch."""
        return self._source.division.even

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        division = self._source.division
        self._source.division = replace(division, even=even and division.size > 1)

    @property
    def fills_batches(self) -> bool:
        """Whether ``even_batches`` fills up batches, or only gives one sample to ranks without."""
        return self._source.division.fills

    @fills_batches.setter
    def fills_batches(self, fills: bool) -> None:
        self._source.division = replace(self._source.division, fills=fills)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; a restored position in it is kept.

        The user's samplers and dataset are told at once, or when the pass under way has ended.
        """
        progress = self._progress
        if epoch != progress.epoch:
            progress.start = None
        progress.epoch, progress.left = epoch, None
        if progress.leader is None:
            forward_epoch(self._user, epoch)
            forward_epoch(self._user.dataset, epoch)

    def skipping(self, num_batches: int) -> "PreparedLoader":
        """Return this loader with its next epoch starting some batches from the beginning.

        Both share epoch and position: after the shortened epoch, either goes on with the next.
        """
        return PreparedLoader(
            self._user, self._source, self._progress, self._delivery, skip_batches=num_batches
        )

    def known_to(self, window: GradientState) -> DataLoader[Any]:
        """Return this loader, or the user's inside of it where another window is told of batches.

        Raises:
            UsageError: batches were to be skipped.
        """
        if self._delivery.observer is window:
            return self
        if self._skip_batches is not None:
            raise UsageError(
                "expected a loader that prepare() divides before batches of it are skipped, found "
                "skip_first_batches() around one that this Accelerator did not prepare, which each "
                "rank would read whole; prepare the loader first"
            )
        return self._user

    def state_dict(self) -> dict[str, Any]:
        """Return epoch, order and position as JSON-able values.

        The batch at hand counts as consumed; after the last batch, the state points to the next
        epoch. Keep the state of rank 0: without ``even_batches`` another rank may end earlier, and
        with ``dispatch_batches`` rank 0 alone has the own state of an iterable dataset.
        """
        progress, leader = self._progress, self._progress.leader
        start = progress.start if leader is None else leader.start
        epoch = progress.epoch
        if leader is not None and (leader.end_of_dataloader or not leader.start.position):
            start = None
            epoch += leader.end_of_dataloader and epoch == leader.epoch
        state: dict[str, Any] = {
            "version": STATE_VERSION,
            "unit": self._source.division.unit,
            "seed": progress.seed,
            "epoch": epoch,
            "position": 0,
        }
        if start is None:
            return state
        return state | {
            "epoch": start.epoch,
            "position": start.position,
            "order_seed": start.seed,
            "order": (start.identity or OrderIdentity())._asdict(),
            "dataset": start.dataset_state,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that ``load_state_dict`` would refuse; nothing changes.

        Raises:
            CheckpointError: the state is of another version, or counts in other units.
        """
        unit = self._source.division.unit
        if state.get("version") != STATE_VERSION:
            raise CheckpointError(
                f"expected a loader state of version {STATE_VERSION}, found "
                f"{state.get('version')!r}; load it with the version of drivetrain that wrote it"
            )
        if state["unit"] != unit:
            raise CheckpointError(
                f"expected a position in {unit}, found one in {state['unit']}; resume with the "
                "same kind of sampler or batch sampler"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken, with any number of ranks.

        Passes that are under way end without a trace.

        Raises:
            CheckpointError: the state is of another version, or counts in other units.
        """
        self.check_state(state)
        progress = self._progress
        for one in progress.stop():
            self._tell_end(one, finished=False)
        progress.seed = state["seed"]
        progress.epoch = state["epoch"]
        progress.start = None
        if state["position"]:
            progress.start = Start(
                epoch=state["epoch"],
                seed=state["order_seed"],
                position=state["position"],
                identity=OrderIdentity(**state["order"]),
                dataset_state=state["dataset"],
            )

    def _run(self) -> Iterator[Any]:
        """Read one epoch, or the rest of one."""
        one, finished = self._begin(), False
        try:
            self._fetch()
            for step in self._source.steps(one.start):
                share = step.shares[0]
                one.start, one.remainder = step.start, step.remainder
                if share is not None:
                    yield self._deliver(one, share)
                    if one.stopped:
                        raise UsageError(
                            "expected a new iteration after load_state_dict(), found that one goes "
                            "on which was under way then; leave its loop, and iterate again"
                        )
                    if self._delivery.between is not None:
                        self._delivery.between(one)
                    self._fetch()
            if self._delivery.exhausted is not None:
                self._delivery.exhausted()
            finished = True
        finally:
            if not one.stopped:
                self._progress.end(one, finished=finished, alone=self._delivery.alone)
                self._tell_end(one, finished=finished)

    def _fetch(self) -> None:
        window = self._delivery.observer
        if window is not None and window.num_steps > 1:  # which may be interrupted
            number = window.coming_window
            self._progress.mark = self.mark_of(number) or Mark(number, self.state_dict())
        if self._delivery.fetching is not None:
            self._delivery.fetching(self._user)

    def _begin(self) -> Pass:
        progress = self._progress
        if leader := progress.leader:
            one = Pass(self, progress, progress.epoch, progress.beside(leader))
        else:
            synchronize_rng_states(self._delivery.rng_types, self._user.generator)
            one = Pass(self, progress, progress.epoch, self._start())
            progress.lead(one)
        progress.passes.append(one)
        return one

    def _start(self) -> Start:
        """Return the start of the next pass, and use up the skipped batches."""
        progress = self._progress
        start = progress.start
        if start is None:
            seed = self._source.draw_seed(progress.seed, progress.epoch)
            start = Start(epoch=progress.epoch, seed=seed)
        if self._skip_batches is not None:
            position = self._skip_batches * self._source.division.stride
            start = replace(start, position=position, dataset_state=None)
            progress.start, self._skip_batches = start, None
        return start

    def _deliver(self, one: Pass, share: RankBatch) -> Any:
        """Return a batch as the script gets it."""
        self._progress.deliver(one)
        one.note(share)
        delivery, batch = self._delivery, share.batch
        if delivery.device is not None:
            batch = send_to_device(batch, delivery.device, non_blocking=delivery.non_blocking)
        if delivery.delivered is not None:
            batch = delivery.delivered(batch)
        if delivery.observer is not None:
            delivery.observer.deliver(one, batch)
        return batch

    def _tell_end(self, one: Pass, *, finished: bool) -> None:
        window, mark = self._delivery.observer, self._progress.mark
        if window is not None:
            window.end(one, finished=finished)
            if mark is not None and mark.window > window.windows:  # between two, for an evaluation
                self._progress.mark = None


# --- turns the user's loader into this rank's part of it ---

LARGEST_SEED = 2**63 - 1
"""Seeds travel as signed integers of 64 bits."""


def prepare_data_loader(
    loader: DataLoader[Any],
    *,
    axis: Axis,
    world: World,
    config: DataConfig,
    seed: int | None,
    delivery: Delivery = Delivery(),
) -> PreparedLoader:
    """Divide a loader over the data-parallel axis.

    Args:
        loader: the user's loader; a prepared loader is returned as it is.
        axis: the data-parallel axis; ranks with the same index on it get the same batches.
        world: all ranks; they must iterate together.
        config: how to divide.
        seed: of the shuffle order, unless the configuration has a data_seed; None takes the seed of
            rank 0's generator: the loader's own, or torch's. Collective then.
        delivery: work before and after each epoch and batch.

    Raises:
        UsageError: the loader cannot be divided; the message says how to change it.
    """
    if isinstance(loader, PreparedLoader):
        return loader
    _check_readable(loader, axis.size)
    delivery = replace(
        delivery,
        rank=axis.rank,
        non_blocking=config.non_blocking,
        alone=delivery.observer is None or world.size == 1,
    )
    chosen = seed if config.data_seed is None else config.data_seed
    if chosen is None:
        # The generator that would shuffle the loader without this library. It is read, not drawn
        # from: a script's own random numbers stay as they are.
        dataset = loader.dataset if isinstance(loader.dataset, IterableDataset) else None
        own = generators(loader.batch_sampler, loader.sampler, loader, dataset)
        generator = next(own, torch.default_generator)
        chosen = seed_of_main(generator.initial_seed() & LARGEST_SEED, world)
    source = _source(loader, axis, world, config, on_device=delivery.device is not None)
    return PreparedLoader(loader, source, Progress(seed=chosen), delivery)


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> PreparedLoader:
    """Return a loader whose next epoch starts some batches from its beginning.

    The count is absolute, also after a position was restored. Later epochs are whole. With a
    prepared loader, both share epoch and position. No sample before the position is read, except
    from an iterable dataset, which is read past it.

    Args:
        dataloader: any loader; an unprepared loader is read by this process alone.
        num_batches: this rank's batches to leave out.

    Raises:
        UsageError: the number is negative, or the loader cannot be taken apart.
    """
    if num_batches < 0:
        raise UsageError(f"expected num_batches >= 0, found {num_batches}")
    if isinstance(dataloader, PreparedLoader):
        return dataloader.skipping(num_batches)
    alone = Axis(name="dp", size=1, rank=0, ranks=(0,), hosts=("localhost",))
    config = DataConfig(use_seedable_sampler=False)
    prepared = prepare_data_loader(dataloader, axis=alone, world=World(), config=config, seed=0)
    return prepared.skipping(num_batches)


def _check_readable(loader: DataLoader[Any], size: int) -> None:
    """Refuse loaders that cannot be taken apart into indices and a dataset, over ``size`` ranks."""
    kind = type(loader)
    if kind.__iter__ is not DataLoader.__iter__:
        raise UsageError(
            f"expected a loader that iterates as torch's DataLoader, found {kind.__name__} with "
            "its own __iter__, which would not run; pass a DataLoader (its position is saved and "
            "restored without help), or leave this loader unprepared"
        )
    if loader.num_workers and not loader.in_order:
        raise UsageError(
            "expected a loader with in_order=True, found in_order=False: a position in the epoch "
            "means nothing when batches overtake each other; remove the argument"
        )
    if size > 1 and isinstance(loader.sampler, DistributedSampler):
        raise UsageError(
            "expected a sampler over the whole dataset, found a DistributedSampler: the loader "
            "would be divided over the ranks twice; use shuffle=True or an ordinary sampler"
        )


def _source(
    loader: DataLoader[Any],
    axis: Axis,
    world: World,
    config: DataConfig,
    *,
    on_device: bool,
) -> BatchSource:
    dispatched = bool(config.dispatch_batches) and world.size > 1
    ranks = tuple(range(axis.size)) if dispatched else (axis.rank,)
    source: BatchSource
    if isinstance(loader.dataset, IterableDataset):
        cut = _sample_division(loader, axis, config)
        if max(axis.size, world.size) > 1 and not dispatched:
            return StreamSource(loader, cut, axis, world, config, on_device=on_device)
        source = IterableSource(loader, cut, ranks=ranks)
    else:
        order, division = _order(loader, axis, config)
        source = MapSource(
            loader,
            order,
            division,
            ranks=ranks,
            seedable=config.use_seedable_sampler,
            world=World() if dispatched else world,  # rank 0 reads alone, with nobody to agree with
        )
    if dispatched:
        return DispatchSource(source, world, axis.rank, on_device=on_device)
    return source


def _order(
    loader: DataLoader[Any], axis: Axis, config: DataConfig
) -> tuple[EpochOrder, OrderDivision]:
    """Return the order to divide: samples under torch's batch sampler, or the user's batches."""
    sampler: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    if type(sampler) is BatchSampler:
        division = _samples(sampler.batch_size, sampler.drop_last, axis, config)
        return EpochOrder(sampler.sampler), division
    if loader.batch_sampler is not None or isinstance(sampler, BatchSampler):
        return EpochOrder(sampler), _batches(sampler, axis, config)
    return EpochOrder(sampler), _sample_division(loader, axis, config)


def _sample_division(loader: DataLoader[Any], axis: Axis, config: DataConfig) -> SampleDivision:
    """Divide by the loader's own batch size; without one, each item is a batch."""
    if loader.batch_size is None and config.split_batches and axis.size > 1:
        raise UsageError(
            "expected a loader with a batch_size to divide its batches with split_batches, found "
            "batch_size=None; set split_batches=False"
        )
    return _samples(loader.batch_size or 1, loader.drop_last, axis, config)


def _samples(batch_size: int, drop_last: bool, axis: Axis, config: DataConfig) -> SampleDivision:
    if config.split_batches:
        _check_divides(batch_size, axis.size)
        batch_size //= axis.size
    return SampleDivision(
        size=axis.size,
        batch_size=batch_size,
        even=config.even_batches and axis.size > 1,
        drop_last=drop_last,
    )


def _batches(sampler: Any, axis: Axis, config: DataConfig) -> BatchDivision:
    batch_size: Any = getattr(sampler, "batch_size", None)
    split = config.split_batches and axis.size > 1
    even = config.even_batches and axis.size > 1
    if split and batch_size is None:
        raise UsageError(
            f"expected the batch sampler {type(sampler).__name__} to have a batch_size, found "
            "none; give it that attribute, or set split_batches=False for batches of varying size"
        )
    if split:
        _check_divides(batch_size, axis.size)
    return BatchDivision(
        size=axis.size,
        batch_size=batch_size,
        split=split,
        even=even,
        drop_last=bool(getattr(sampler, "drop_last", False)),
    )


def _check_divides(batch_size: int, size: int) -> None:
    if batch_size % size:
        raise UsageError(
            f"expected a batch size that divides over {size} ranks with split_batches, found "
            f"{batch_size}; use a multiple of {size} or set split_batches=False"
        )
