"""A run that is told to end saves after a step that all ranks agree on, and asks to be restarted.

The notice of one rank is enough: ranks exchange what they heard when they step.
"""

import weakref
from collections.abc import Callable

from drivetrain.facade.options import ProjectConfiguration
from drivetrain.log import get_logger
from drivetrain.runtime.gradient_state import ActivePass, GradientState
from drivetrain.runtime.notices import PREEMPTED, Notice
from drivetrain.runtime.world import World, is_launched

logger = get_logger(__name__)


class Preemption:
    """The end of a run after a scheduler's notice.

    Args:
        world: this process among all processes.
        state: whether a window is complete, and which pass is under way.
        save: method that saves the run under an automatic name, and returns the directory; its
            object is not kept alive.

    Attributes:
        told: whether a rank has told all the others of a notice.
    """

    def __init__(self, world: World, state: GradientState, save: Callable[[], str]) -> None:
        self.told = False
        self._between_steps: weakref.WeakMethod[Callable[[], None]] | None = None
        self._world = world
        self._state = state
        self._save = weakref.WeakMethod(save)  # loaders hold this object, and finalizers hold them
        self._notice = Notice()
        self._by_script = False
        self._trained: ActivePass | None = None

    @property
    def heard(self) -> bool:
        """Whether this rank has heard a notice."""
        return bool(self._notice.heard)

    @property
    def agreed(self) -> bool:
        """Whether all ranks know of a notice: the same on every rank after the same step."""
        return self.told if self._world.size > 1 else self.heard

    def asked(self) -> bool:
        """Return ``agreed`` to a script, which handles notices from now on."""
        self._by_script = True
        self._notice.listen()
        return self.agreed

    def listen(self, project: ProjectConfiguration) -> None:
        """Hear notices that a launcher hands on, if there is somewhere to save to."""
        named = project.project_dir is not None and project.automatic_checkpoint_naming
        if named and is_launched():
            self._notice.listen()

    def call_between_steps(self, method: Callable[[], None]) -> None:
        """Call a method whenever the training loop asks for a batch after a whole step."""
        self._between_steps = weakref.WeakMethod(method)

    def after_step(self) -> None:
        """Note which pass over a loader the training loop makes."""
        self._trained = self._state.trained_pass

    def between_batches(self, one: ActivePass) -> None:
        """Take a turn between two steps, and end the run here after a notice.

        A pass is asked for a batch; that of the training loop counts.

        Raises:
            SystemExit: with the code of a saved run, on every rank.
        """
        complete = self._state.sync_gradients and one is self._trained
        if not complete or self._state.uneven:
            return
        between_steps = self._between_steps() if self._between_steps is not None else None
        if between_steps is not None:
            between_steps()
        save = self._save()
        if self._by_script or not self.agreed or save is None:
            return
        self._by_script = True  # once
        directory = save()
        heard = f" ({self._notice.heard})" if self._notice.heard else ""
        logger.announce(
            f"preempted{heard}: saved {directory}; exit code {PREEMPTED} asks to be started again"
        )
        raise SystemExit(PREEMPTED)

    def close(self) -> None:
        """Hear notices no longer."""
        self._notice.close()
        self._trained = None
