"""The base of all conformance checks: the strategy under test, the worlds, an Accelerator."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest

from drivetrain import Accelerator
from drivetrain.testing.models import CASES, Case


class Suite:
    """The ground of the conformance class.

    Attributes:
        strategy: the name of the strategy, or its name and options.
        worlds: the numbers of ranks it is tested on.
        cases: the awkward models, by name, of the checks that train all of them.
        timeout_s: seconds that one check may take.
        rounding: largest relative error of a first loss in a low dtype: the order of additions, or,
            for a strategy whose ranks add parts of a sum in that dtype, its precision.
        inner_axes: mesh axes whose ranks share one replica, and send no gradients over them.
    """

    strategy: ClassVar[str | Mapping[str, Any]]
    worlds: ClassVar[Sequence[int]] = (1, 2, 3, 4)
    cases: ClassVar[Mapping[str, Case]] = CASES
    timeout_s: ClassVar[float] = 300.0
    rounding: ClassVar[float] = 1e-6
    inner_axes: ClassVar[Collection[str]] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run every check on every world."""
        if "world" in metafunc.fixturenames:
            metafunc.parametrize(
                "world",
                [
                    pytest.param(
                        n, marks=pytest.mark.ranks(n, timeout=self.timeout_s), id=f"ranks{n}"
                    )
                    for n in self.worlds
                ],
            )

    def models(self, *names: str) -> Sequence[Case]:
        """Return the models of these names; if ``cases`` has none of them, all that it has."""
        return [self.cases[name] for name in names if name in self.cases] or [*self.cases.values()]

    @contextmanager
    def accelerator(self, **options: Any) -> Iterator[Accelerator]:
        """Return an Accelerator with the strategy under test, taken off at the end.

        After an error the Accelerator is left alone: the processes end, and taking the strategy off
        could wait for ranks that are gone.
        """
        accelerator = self.make_accelerator(**options)
        yield accelerator
        accelerator.free_memory()

    def make_accelerator(self, **options: Any) -> Accelerator:
        """Return an Accelerator with the strategy under test."""
        return Accelerator(strategy=self.strategy, cpu=True, **options)

    def reduced_bytes(self, accelerator: Accelerator) -> int:
        """Return the bytes of reductions so far; gathers of parameters are not about gradients."""
        sent = accelerator.traffic.sent()
        return sum(
            count
            for (axis, operation), count in sent.items()
            if operation != "all_gather" and axis not in self.inner_axes
        )
