"""The cost of a layout: its simulated step, priced and played, and the search for the best.

Here are the options of the strategy ``auto``, which need no torch.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from drivetrain.config.outline import ChoosingOutline
from drivetrain.config.schema import Policy, option
from drivetrain.hardware.description import load_hardware, names_a_device


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoConfig:
    """The hardware for which a strategy is chosen."""

    hardware: str = option(
        "",
        help="Description of the hardware: a name of `drivetrain hardware show`, or a file of "
        "`drivetrain hardware measure`. Empty: the description of the devices' name.",
        question="Which hardware? A name of `drivetrain hardware show` or a file; Enter: look.",
    )


class AutoOutline(ChoosingOutline[AutoConfig]):
    """The outline of ``auto``, whose ranks are replicas under every strategy that it chooses."""

    summary: ClassVar[str] = "choose for me: the layout that is predicted to be the quickest"
    Config: ClassVar[type] = AutoConfig

    @classmethod
    def check_options(cls, config: AutoConfig, precision: Policy) -> None:
        """Refuse an unknown name of hardware, or a file that is there and is no description.

        A file that is missing here may lie on the hosts of the run: ``choose`` reads it there.
        """
        if config.hardware and (names_a_device(config.hardware) or Path(config.hardware).exists()):
            load_hardware(config.hardware)
