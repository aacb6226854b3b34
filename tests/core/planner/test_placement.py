"""The order of hosts by measured links: chains for pipelines, slow links away from rings."""

import itertools
import random
from types import SimpleNamespace

import pytest
import yaml

from drivetrain.errors import ConfigError
from drivetrain.hardware.description import HostPairs, hardware_text
from drivetrain.hardware.measure import host_pairs
from drivetrain.planner import search as placement
from drivetrain.planner.layout import leaving_hosts
from drivetrain.planner.search import HostPlacement
from drivetrain.simulator.step import axis_places


def pairs_of(hosts, rates, other):
    """Return measured pairs: some rates, and another for the rest."""
    rows = [[0.0 if one == two else rates.get(frozenset((one, two)), other) for two in hosts]
            for one in hosts]  # fmt: skip
    return HostPairs(source="the test", hosts=list(hosts), gigabytes_per_second=rows)


def chain_of(names, quick=10.0, slow=1.0):
    """Return pairs of which neighbors in a row of names have the quick links."""
    rates = {frozenset(each): quick for each in itertools.pairwise(names)}
    return pairs_of(sorted(names), rates, slow)


def test_the_best_links_carry_most():
    place = HostPlacement("abcd", (2, 2, 2, 2), {"tp": 2, "dp": 1, "pp": 4}, {}, chain_of("cadb"))
    order = "".join("abcd"[index] for index in place.best().hosts)
    assert order in ("cadb", "bdac")
    # Two ranks of tp on each host: two chains of three links.
    assert place.best().chain == pytest.approx(2 * 3 / 10)
    assert place.given().chain > place.best().chain

    # Pairs a-c and b-d are quick: replicas go there, though stages then cross the slow links.
    quick = {frozenset("ac"): 10.0, frozenset("bd"): 10.0}
    pairs = pairs_of("abcd", quick, 1.0)
    place = HostPlacement("abcd", (1, 1, 1, 1), {"dp": 2, "pp": 2}, {"dp": 5e9}, pairs)
    best = place.best()
    assert {frozenset(best.hosts[:2]), frozenset(best.hosts[2:])} == {
        frozenset((0, 2)), frozenset((1, 3))
    }  # fmt: skip
    assert best.seconds == pytest.approx(0.5)
    assert place.given().seconds == pytest.approx(5.0)

    # A tp of 2 must not cross from a host of 3 ranks to a host of 1 over the slow link.
    pairs = pairs_of("abc", {frozenset("ac"): 10.0}, 1.0)
    place = HostPlacement("abc", (3, 4, 1), {"tp": 2, "dp": 4}, {"tp": 1e9, "dp": 1e6}, pairs)
    best = place.best()
    assert best.hosts.index(0) + 1 == best.hosts.index(2) or best.hosts[0] == 1
    assert best.seconds < place.given().seconds

    names = [f"h{index:02}" for index in range(12)]
    shuffled = random.Random(3).sample(names, 12)
    place = HostPlacement(names, (1,) * 12, {"dp": 1, "pp": 12}, {}, chain_of(shuffled))
    order = [names[index] for index in place.best().hosts]
    assert order in (shuffled, shuffled[::-1])
    assert len(names) > placement.MOST_EXHAUSTIVE


def test_an_order_stays_where_no_other_is_better():
    place = HostPlacement("abc", (1, 1, 1), {"dp": 3}, {"dp": 1e9}, pairs_of("abc", {}, 1.0))
    assert place.best().hosts == (0, 1, 2)
    ring = HostPlacement("abc", (1, 1, 1), {"dp": 3}, {"dp": 1e9}, chain_of("abc"))
    assert ring.best().seconds == ring.given().seconds == 1.0  # from c back to a

    pairs = pairs_of("abc", {frozenset("ab"): 10.0, frozenset("bc"): 0.0}, 2.0)
    assert [pairs.rate(*pair) for pair in ("ab", "ac", "cb")] == [10.0, 2.0, 2.0]

    with pytest.raises(ConfigError, match="measured links of every host, found none of x"):
        HostPlacement("ax", (1, 1), {"dp": 2}, {}, chain_of("abc"))


def test_ranks_become_hosts():
    rates = {(0, 1): 9e9, (0, 2): 1e9, (1, 3): 2e9, (2, 3): 9e9}
    found = host_pairs(rates, ("n1", "n1", "n2", "n2"))
    assert found == {"hosts": ["n1", "n2"], "gigabytes_per_second": [[0.0, 2.0], [2.0, 0.0]]}
    assert host_pairs({(0, 1): 9e9}, ("n1", "n1")) is None

    from drivetrain_launch.commands.preview import ranks_of
    from drivetrain_launch.ranks.remote import RemoteHost

    resolved = SimpleNamespace(run=SimpleNamespace(launch=SimpleNamespace(nproc_per_node=4)))
    assert ranks_of([RemoteHost("a", slots=2), RemoteHost("b")], resolved) == [2, 4]

    places = axis_places({"tp": 4, "dp": 4}, per_host=8)  # 2 hosts, 4 lines of dp across them
    sent = {("tp", "all_reduce"): 1000.0, ("dp", "all_reduce"): 10.0, ("bus", "read"): 5.0}
    assert leaving_hosts(sent, places) == 4 * 10.0
    assert leaving_hosts(sent, axis_places({"tp": 4, "dp": 2}, per_host=8)) == 0


# --- the launcher ---


def dry_run(tmp_path, *words):
    from drivetrain_launch.cli import run

    values = yaml.safe_load(hardware_text("cpu"))
    values["links"]["pairs"] = chain_of(["n1", "n3", "n2"]).model_dump()
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    topology = ("--topology", str(tmp_path / "mine.yaml"))
    return run(["launch", "--cpu", "--dry-run", *topology, *words])


def test_a_dry_run_shows_hosts_in_the_order_of_their_links(tmp_path, capsys):
    megatron = ("--strategy", "megatron", "--set", "strategy.pp=3", "--set", "strategy.tp=2")
    assert dry_run(tmp_path, "--hosts", "n1:2,n2:2,n3:2", *megatron) == 0
    out, err = capsys.readouterr()
    assert "hosts in the order n1, n3, n2: " in err
    lines = [" ".join(line.split()) for line in out.splitlines()]
    found = [line for line in lines if line in ("n1 0, 1", "n2 2, 3", "n3 2, 3", "n2 4, 5")]
    assert found == ["n1 0, 1", "n3 2, 3", "n2 4, 5"]
    assert any(line.startswith("activations over pp between hosts") for line in lines)


def test_a_topology_that_cannot_be_used_is_one_clear_line(tmp_path, capsys):
    for words, expected in (
        ((), "--topology orders the hosts of --hosts or --hostfile, found neither"),
        (("--hosts", "n1:2,n9:2"), "measured links of every host, found none of n9"),
        (("--hosts", "n1,n2"), "expected a number of ranks for each host"),
    ):
        assert dry_run(tmp_path, *words) == ConfigError.exit_code
        assert expected in capsys.readouterr().err


def test_a_description_without_pairs_is_refused(capsys):
    from drivetrain_launch.cli import run

    words = ["--dry-run", "--hosts", "a:1,b:1", "--topology", "h100"]
    assert run(["launch", "--cpu", *words]) == ConfigError.exit_code
    assert "expected rates between hosts, links.pairs, found none" in capsys.readouterr().err
