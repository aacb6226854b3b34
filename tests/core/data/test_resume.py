"""Positions: saved, restored on any number of ranks, skipped, left by break."""

import gc
import itertools
import json

import pytest
import torch
from torch.utils.data import DataLoader, Sampler

from drivetrain.data import skip_first_batches
from drivetrain.errors import CheckpointError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Batches(list):
    """Batches of the user."""

    batch_size = 3


def begun(loader, batches=1):
    """Return the state of a loader after some batches, and what is left of them."""
    left = iter(loader)
    for _ in range(batches):
        next(left)
    return loader.state_dict(), left


def test_resume_from_every_position_on_every_number_of_ranks(prepare, counting, read_all, gathered):
    cases = itertools.product((7, 12), (1, 3), (1, 2, 3), (1, 2, 4), (False, True), (False, True))
    for n, bs, before, after, even, custom in cases:
        if custom and (n, bs, even) != (7, 3, True):
            continue

        def make(n=n, bs=bs, custom=custom):
            if custom:
                batches = [[0, 1, 2], [3, 4, 5], [6]]
                return DataLoader(counting(n), batch_sampler=Batches(batches))
            return DataLoader(counting(n), batch_size=bs, shuffle=True)

        savers = [prepare(make(), rank, before, even_batches=even) for rank in range(before)]
        consumed = set()
        for step in zip(*savers, strict=False):
            consumed.update(torch.cat(step).tolist())
            if savers[0].end_of_dataloader:
                break
            state = json.loads(json.dumps(savers[0].state_dict()))
            assert state["unit"] == ("batches" if custom else "samples")
            batches, loaders = read_all(make, after, state=state, even_batches=even)
            rest = gathered(batches, loaders[0].remainder)
            case = (n, bs, before, after, even, state)
            assert sorted([*consumed, *rest]) == list(range(n)), case


@pytest.mark.parametrize("workers", [0, 2])
def test_resumed_epoch_equals_the_uninterrupted_one(prepare, counting, workers):
    def make(seed=3):
        data = DataLoader(counting(23), batch_size=2, shuffle=True, num_workers=workers)
        return prepare(data, 1, 2, seed=seed)

    interrupted = make()
    seen = []
    for batch in interrupted:
        seen.append(batch.tolist())
        if len(seen) == 3:
            state = interrupted.state_dict()
            break
    resumed = make(seed=4)
    resumed.load_state_dict(state)
    assert len(resumed) == 6
    for _ in range(2):
        seen += [batch.tolist() for batch in resumed]
    first = make()
    expected = [batch.tolist() for _ in range(2) for batch in first]
    assert seen == expected


def test_resume_touches_no_sample_before_the_position_and_reads_none_ahead(prepare, counting):
    state, _ = begun(prepare(DataLoader(counting(40), batch_size=4)), 7)
    data = counting(40)
    resumed = prepare(DataLoader(data, batch_size=4))
    resumed.load_state_dict(state)
    before = torch.get_rng_state()
    next(iter(resumed))
    assert data.read == [28, 29, 30, 31]
    assert torch.equal(torch.get_rng_state(), before), "random augmentation is the same"


def test_state_of_the_users_generator_survives(prepare, counting):
    def make(seed):
        torch.manual_seed(seed)
        data = DataLoader(counting(20), batch_size=4, shuffle=True)
        return prepare(data, use_seedable_sampler=False)

    state, batches = begun(make(1))
    resumed = make(99)
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert torch.cat(list(resumed)).tolist() == torch.cat(list(batches)).tolist()


def test_state_after_the_last_batch_is_the_next_epoch(prepare, counting):
    loader = prepare(DataLoader(counting(4), batch_size=2, shuffle=True))
    states = [loader.state_dict() for _ in loader]
    assert [(state["epoch"], state["position"]) for state in states] == [(0, 2), (1, 0)]
    assert (loader.epoch, loader.state_dict()["position"]) == (1, 0)
    resumed = prepare(DataLoader(counting(4), batch_size=2, shuffle=True))
    resumed.load_state_dict(states[-1])
    assert torch.equal(torch.cat(list(resumed)), torch.cat(list(loader)))


def test_a_break_or_an_exception_moves_to_the_next_epoch(prepare, counting, recorder):
    loader, whole = (
        prepare(DataLoader(counting(20), batch_size=2, shuffle=True), observer=recorder)
        for _ in "12"
    )
    for _ in loader:
        break
    list(whole)
    assert (loader.epoch, recorder.stack) == (1, [])
    assert torch.equal(torch.cat(list(loader)), torch.cat(list(whole)))
    batches = iter(loader)
    assert loader.epoch == 2, "an iterator that is never asked changes nothing"
    next(batches)
    with pytest.raises(ZeroDivisionError):
        batches.throw(ZeroDivisionError)
    assert (loader.epoch, recorder.stack) == (3, [])


def test_set_epoch_keeps_a_restored_position_of_that_epoch(prepare, counting):
    saver, loader = (prepare(DataLoader(counting(8), batch_size=2)) for _ in "12")
    saver.set_epoch(3)
    state, left = begun(saver)
    left.close()
    for epoch, batches in ((3, 3), (4, 4)):
        loader.load_state_dict(state)
        loader.set_epoch(epoch)
        assert len(list(loader)) == batches
    for _ in loader:
        loader.set_epoch(7)  # inside the loop it has the last word
        state = loader.state_dict()
    assert state["epoch"] == loader.epoch == 7
    assert len(list(loader)) == 4


def test_a_second_iteration_leaves_the_workers_of_the_first_alone(prepare, counting):
    kept = {"num_workers": 1, "persistent_workers": True}
    loader = prepare(DataLoader(counting(8), batch_size=2, **kept))
    first = iter(loader)
    seen = [next(first)]
    assert torch.cat(list(loader)).tolist() == list(range(8))
    assert torch.cat([*seen, *first]).tolist() == list(range(8))
    del first, loader
    gc.collect()  # with the loader its worker ends


def test_a_second_iteration_is_a_pass_of_its_own(prepare, counting, recorder):
    user = DataLoader(counting(8), batch_size=2, shuffle=True)
    loader, other = (prepare(user, observer=recorder) for _ in "12")
    whole = torch.cat(list(other)).tolist()
    first = iter(loader)
    seen = [next(first)]
    state = loader.state_dict()
    beside = torch.cat(list(loader)).tolist()
    assert sorted(beside) == list(range(8))
    assert beside != whole
    assert (loader.state_dict()["position"], loader.epoch) == (0, 1), "it read while first stood"
    seen += list(first)
    assert torch.cat(seen).tolist() == whole
    assert (recorder.stack, loader.epoch) == ([], 1)
    loader.load_state_dict(state)
    passes = list(zip(loader, loader, loader, strict=False))  # others begin at the beginning
    orders = [torch.cat(each).tolist() for each in zip(*passes, strict=True)]
    assert orders[0] == whole[2:]
    assert orders[1] != orders[2]


def test_loading_a_state_inside_the_loop_ends_the_loop(prepare, counting):
    loader = prepare(DataLoader(counting(8), batch_size=2))
    state, batches = begun(loader)
    next(batches)
    loader.load_state_dict(state)
    with pytest.raises(UsageError, match="a new iteration after load_state_dict"):
        next(batches)
    assert [batch.tolist() for batch in loader] == [[2, 3], [4, 5], [6, 7]]


def test_skipping_is_absolute_and_for_one_epoch(prepare, counting):
    data = counting(10)
    loader = prepare(DataLoader(data, batch_size=2))
    state, batches = begun(loader)
    batches.close()
    loader.load_state_dict(state)
    data.read.clear()
    skipped = skip_first_batches(loader, 2)
    assert [batch.tolist() for batch in skipped] == [[4, 5], [6, 7], [8, 9]]
    assert data.read[0] == 4
    assert loader.epoch == 1
    assert len(list(skipped)) == len(list(loader)) == 5
    for rank in range(2):
        loader = prepare(DataLoader(counting(10), batch_size=2), rank, 2)
        batches = [batch.tolist() for batch in skip_first_batches(loader, 2)]
        assert batches == [[[8, 9], [0, 1]][rank]]
        assert (loader.remainder, loader.end_of_dataloader) == (2, True)
    assert list(skip_first_batches(loader, 3)) == []


def test_skipping_in_a_loader_that_is_not_prepared(counting):
    data = counting(6)
    skipped = skip_first_batches(DataLoader(data, batch_size=2), 1)
    assert [batch.tolist() for batch in skipped] == [[2, 3], [4, 5]]
    assert data.read[0] == 2
    assert len(list(skipped)) == 3
    with pytest.raises(UsageError, match="-1"):
        skip_first_batches(DataLoader(data), -1)


def test_position_in_another_dataset_or_of_another_kind_is_refused(prepare, counting):
    state, _ = begun(prepare(DataLoader(counting(8), batch_size=2)))
    loader = prepare(DataLoader(counting(9), batch_size=2))
    loader.load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"total=8.*total=9"):
        next(iter(loader))
    for other, message in (({"version": 0}, "version"), ({"unit": "batches"}, "in samples")):
        with pytest.raises(CheckpointError, match=message):
            loader.load_state_dict(state | other)


def test_sampler_that_cannot_be_reproduced_is_found_at_resume(prepare, counting):
    class Hidden(Sampler):
        calls = 0

        def __len__(self):
            return 6

        def __iter__(self):
            Hidden.calls += 1
            return iter([(i + Hidden.calls) % 6 for i in range(6)])

    state, _ = begun(prepare(DataLoader(counting(6), sampler=Hidden())))
    loader = prepare(DataLoader(counting(6), sampler=Hidden()))
    loader.load_state_dict(state)
    with pytest.raises(CheckpointError, match="same dataset and sampler"):
        next(iter(loader))
