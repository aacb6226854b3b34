"""The seeds of sums by chance: each message draws for itself."""

from drivetrain.collectives.stretch import ParameterSpan
from drivetrain.links.codec import SeedCounts


def test_no_two_messages_have_the_same_seed():
    places = (("one", 0), ("one", 4096), ("two", 0))
    spans = [ParameterSpan(name, 8192, 64, first, 0, 4096) for name, first in places]
    counts, seeds = SeedCounts(spans), []
    for _ in range(3):
        seeds += [counts.seed([span], rank) for span in spans for rank in range(2)]
        counts.advance()
    assert len(set(seeds)) == len(seeds)
