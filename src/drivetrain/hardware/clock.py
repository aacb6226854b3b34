"""Repeated timings: the time that they show, and how far they scatter.

A machine is slower in some seconds than in others, so the same work is best timed in several
rounds: a clock keeps the timings of earlier rounds by name, and shows what all of them say.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

REPEATS = 7
"""Timings of one piece of work."""

WARM_UPS = 2
CACHES = 32 * 2**20
"""Bytes that are written between some timings: more than the caches of one processor core hold."""

LOUD = 0.2
"""Scatter from which a measurement is said to be doubtful."""


@dataclass
class Clock:
    """Times work on a device, and remembers which timings scattered.

    Attributes:
        device: whose queue must be empty before the clock is read.
        advance: called after each piece of work, for a bar.
        loud: scatter by name, where it is above ``LOUD``.
        samples: seconds of all timings so far, by name.
    """

    device: torch.device
    advance: Callable[[], object] = lambda: None
    loud: dict[str, float] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def time(
        self,
        name: str,
        work: Callable[[], object],
        *,
        times: int = 1,
        before: Callable[[], object] = lambda: None,
    ) -> float:
        """Return the seconds of one piece of work: the median, of its earlier timings, too.

        Args:
            name: of the work, in all rounds and in the report of scatter.
            work: is called again and again.
            times: calls within one timing, for work too short for the clock.
            before: prepares each timing, and is not timed.
        """
        samples = self.samples[name]
        for index in range(WARM_UPS + REPEATS):
            before()
            self._finish()
            start = time.perf_counter()
            for _ in range(times):
                work()
            self._finish()
            if index >= WARM_UPS:
                samples.append((time.perf_counter() - start) / times)
        seconds, scatter = median_of(samples)
        self.loud.pop(name, None)
        if scatter > LOUD:
            self.loud[name] = scatter
        self.advance()
        return seconds

    def _finish(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def median_of(samples: list[float]) -> tuple[float, float]:
    """Return the median, and over it half of the range of all but the two extremes.

    The quickest timings would say too little: a step is a sum of many kernels, some of them slow.
    """
    ordered = sorted(samples)
    middle = ordered[1:-1] or samples
    median = statistics.median(ordered)
    return median, (middle[-1] - middle[0]) / 2 / median if median else 0.0
