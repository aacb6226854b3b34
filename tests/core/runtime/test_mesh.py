"""Groups of neighbors on an axis of the mesh, and the ranks across them."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from drivetrain.errors import ConfigError
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.world import World


def planned(sizes, hosts, rank=0):
    """A mesh of made-up hosts, one letter each, as one of their ranks sees it."""
    world = World(rank=rank, size=len(hosts), hosts=tuple(hosts))
    return Mesh.plan(sizes, world), world


def summed(axis, value):
    total = torch.tensor(value)
    dist.all_reduce(total, group=axis.group)
    return int(total)


def test_a_number_that_does_not_divide_is_refused():
    mesh, _ = planned({"dp": 4}, "aaaa")
    for size in (0, -2, 3, 8):
        for cut in (mesh.across, mesh.neighbors):
            with pytest.raises(ConfigError, match=f"divides the 4 ranks .*'dp', found {size}"):
                cut("dp", size)


@pytest.mark.ranks(4)
def test_both_groups_of_a_cut_communicate():
    world = World.discover(cpu=True)
    mesh = Mesh.build({"dp": 4}, world)
    near, far = mesh.start_neighbors("dp", 2, world), mesh.start_across("dp", 2, world)
    assert near is mesh.start_neighbors("dp", 2, world), "started twice"
    assert far is mesh.start_across("dp", 2, world)
    assert summed(near, 10**world.rank) == (11, 11, 1100, 1100)[world.rank]
    assert summed(far, 10**world.rank) == (101, 1010, 101, 1010)[world.rank]
    # Groups of one need no process group.
    assert mesh.start_across("dp", 4, world).group is None
    assert mesh.start_neighbors("dp", 1, world).group is None
    assert summed(mesh.start_across("dp", 1, world), world.rank) == 6
    mesh = Mesh.build({"tp": 2, "dp": 2}, world)
    assert mesh.neighbors("dp", 2).ranks == ((0, 2), (1, 3), (0, 2), (1, 3))[world.rank]
    everyone = mesh.start_around("dp", mesh.start_neighbors("dp", 1, world), world)
    assert summed(everyone, 10**world.rank) == (11, 11, 1100, 1100)[world.rank]


def test_across_on_an_axis_that_is_not_the_first():
    """tp=2 lies closest, so the dp lines are 0, 2, 4, 6 and 1, 3, 5, 7."""
    for rank in range(8):
        mesh, _ = planned({"tp": 2, "dp": 4}, "aaaabbbb", rank)
        near, far = mesh.neighbors("dp", 2), mesh.across("dp", 2)
        tp, dp = rank % 2, rank // 2
        assert (near.name, near.size, near.rank) == ("dp.near", 2, dp % 2)
        assert (far.name, far.size, far.rank) == ("dp.far", 2, dp // 2)
        assert far.ranks == (tp + 2 * (dp % 2), tp + 2 * (dp % 2) + 4)
        assert (far.hosts, far.spans_hosts, near.spans_hosts) == (("a", "b"), True, False)
        assert near.ranks[near.rank] == far.ranks[far.rank] == rank


def test_inside_of_a_group_the_other_axes_stay():
    """tp=2 lies closest and dp=6 is cut into groups of 2: blocks of four ranks in a row."""
    for rank in range(12):
        mesh, world = planned({"tp": 2, "dp": 6}, "aaaabbbbcccc", rank)
        near = mesh.neighbors("dp", 2)
        inside, everyone = mesh.inside("dp", near), mesh.around("dp", near, world)
        assert list(inside) == ["tp", "dp"]
        assert inside["tp"] is mesh["tp"]
        assert (inside["dp"].ranks, inside["dp"].position) == (near.ranks, mesh["dp"].rank)
        first = rank - rank % 4
        assert everyone.ranks == (first, first + 1, first + 2, first + 3)
        assert everyone.ranks[everyone.rank] == rank
        assert not everyone.spans_hosts
        assert mesh.line("dp.near.all") is everyone
        assert inside.per_host("dp", world) == 2
        assert inside.neighbors("dp", 1).position == mesh["dp"].rank
    mesh, world = planned({"dp": 4}, "aabb")
    near = mesh.neighbors("dp", 2)
    assert mesh.around("dp", near, world) is near


def test_groups_and_lines_across_meet_in_one_rank():
    for size in (1, 2, 3, 12):
        seen = set()
        for rank in range(12):
            mesh, _ = planned({"dp": 12}, "a" * 12, rank)
            near, far = mesh.neighbors("dp", size), mesh.across("dp", size)
            assert (near.size, far.size) == (size, 12 // size)
            assert set(near.ranks) & set(far.ranks) == {rank}
            seen |= {near.ranks, far.ranks}
        counts = Counter(rank for ranks in seen for rank in ranks)
        assert counts == dict.fromkeys(range(12), 2), "groups overlap, or leave a rank out"


def test_how_many_neighbors_share_a_host():
    for sizes, hosts, expected in (
        ({"dp": 4}, "aaaa", 4),
        ({"dp": 4}, "abcd", 1),
        ({"dp": 6}, "bbbaaa", 3),
        ({"tp": 2, "dp": 4, "pp": 2}, "aaaaaaaabbbbbbbb", 4),
        ({"tp": 4, "dp": 2}, "aaaabbbb", 1),
    ):
        for rank in range(len(hosts)):
            mesh, world = planned(sizes, hosts, rank)
            assert mesh.per_host("dp", world) == expected


def test_uneven_hosts_are_refused_on_all_ranks():
    for sizes, hosts, found in (
        ({"dp": 4}, "aaab", "along ranks 0, 1, 2, 3: 3 on 'a', 1 on 'b'"),
        ({"dp": 4}, "abab", "1 on 'a', 1 on 'b', 1 on 'a', 1 on 'b'"),
        ({"dp": 6}, "aabbaa", "2 on 'a', 2 on 'b', 2 on 'a'"),
        # The line of even ranks is even, that of odd ones is not: all ranks must hear of it.
        ({"tp": 2, "dp": 4}, "aaabbbbb", "2 on 'b'; along ranks 1, 3, 5, 7: 1 on 'a', 3 on 'b'"),
        ({"tp": 2, "dp": 2}, "abac", "2 on 'a'; along ranks 1, 3: 1 on 'b', 1 on 'c'"),
    ):
        for rank in range(len(hosts)):
            mesh, world = planned(sizes, hosts, rank)
            with pytest.raises(ConfigError, match="equally many ranks of the axis 'dp'") as caught:
                mesh.per_host("dp", world)
            assert found in str(caught.value)
            assert "give the number of neighbors" in str(caught.value)
