"""The part of a strategy's contract for slow links."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from drivetrain.collectives import Communicator
from drivetrain.errors import ConfigError
from drivetrain.links.chosen import LinkMethods
from drivetrain.links.compressor import Compressor
from drivetrain.runtime.mesh import Axis
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.world import World


class OverLinks:
    """The part of the contract for slow links: by default a strategy sends all as it is.

    Attributes:
        run: has the methods for slow links.
        summing: the communicators whose channels sum the strategy's gradients.
        linked: all communicators with channels; left empty where these are in ``summing``.
    """

    run: Any
    summing: Sequence[Communicator] = ()
    linked: Sequence[Communicator] = ()

    @classmethod
    def channels(cls, config: Any) -> frozenset[str]:
        """Return the kinds of tensors that the strategy sends by channels.

        Returns:
            Some of ``gradients``, ``parameters`` (their values, each time that they are used),
            ``updates`` (of parameters that all ranks hold) and ``activations`` (between stages),
            which a link may then approximate.
        """
        return frozenset()

    @classmethod
    def crosses_links(cls, config: Any, world: World) -> bool:
        """Return whether ranks of a world send anything by the methods for slow links.

        By default they do where the world has several hosts.
        """
        return world.spans_hosts

    @classmethod
    def changes_links(cls, config: Any) -> bool:
        """Return whether methods may be chosen after the first steps, by ``take_links``.

        Then a backward is the compute beside the sums of gradients, and its half the compute beside
        gathers of values. By default methods are chosen at ``prepare()`` alone.
        """
        return False

    @classmethod
    def advises_against(cls, config: Any, method: Compressor[Any]) -> bool:
        """Return whether training by a method for gradients is known to go wrong.

        A run may name such a method; ``auto`` leaves the method out. By default none is known.
        """
        return False

    def will_scale(self, factor: float) -> None:
        """Learn the factor of ``scale_gradients`` after the synchronised backward that comes.

        By default the sums of gradients do not depend on it. A strategy around another strategy
        tells it.
        """
        return

    def take_links(self, links: LinkMethods) -> None:
        """Go on with methods that were chosen between two steps, the same on all ranks.

        A strategy with ``changes_links`` around another strategy extends it.
        """
        self.run = replace(self.run, links=links)
        for communicator in self.linked or self.summing:
            communicator.take_links(links)

    @property
    def steps_apart(self) -> bool:
        """Whether ranks of ``dp`` take steps by themselves: then their norms and weights differ."""
        return False

    @property
    def steps_with(self) -> Axis | None:
        """The ranks that wait for each other at every step; None means all ranks.

        Nobody waits for the other ranks at a step, so no rank learns there what they have found.
        """
        return None

    @property
    def will_step_with(self) -> Axis | None:
        """The ranks of ``steps_with`` at later steps, where the first steps wait for all ranks."""
        return self.steps_with

    def step_decided(self, *, taken: bool) -> None:
        """Note whether optimizers are about to step with the gradients at hand.

        The facade calls it on every rank, before each step, with the same answer. Sums of gradients
        that keep errors go back to those of before a step that is skipped.

        Args:
            taken: False if all ranks skip the step, as ``on_nonfinite: skip`` says.
        """
        for communicator in self.summing:
            communicator.step_decided(taken=taken)

    @classmethod
    def check_links(cls, config: Any, links: LinkMethods, precision: Precision) -> None:
        """Refuse methods that the strategy, or the precision, has no use for.

        ``config check`` and the launcher call it before ranks start, and ``prepare`` does.

        Raises:
            ConfigError: says which methods, and the way out.
        """
        channels = cls.channels(config)
        for use in links.used_for:
            if use not in channels and not (use == "parameters" and "updates" in channels):
                raise ConfigError(
                    f"expected links.far.{use}: exact under {cls.__name__}, which sends no {use} "
                    f"that a link may approximate, found {links.name_for(use)!r}; leave it out, or "
                    "take a strategy that does (docs/slow-links.md)"
                )
        values = links.parameters
        if values is not None and "parameters" in channels and not values.parameters:
            raise ConfigError(
                f"links.far.parameters: expected a method that can send values of parameters, "
                f"which {cls.__name__} gathers for each use, found "
                f"{links.name_for('parameters')!r}, which can send updates; take int8 or bf16, "
                "secondary: host, which sends updates, or zero2, which keeps parameters whole"
            )
        method = links.gradients
        if method is not None and method.keeps_feedback and precision.compute == torch.float16:
            raise ConfigError(
                f"expected precision: bf16 or no with links.far.gradients: "
                f"{links.name_for('gradients')}, found fp16: what the method keeps for the next "
                "step would have another loss scale; change one of them"
            )
