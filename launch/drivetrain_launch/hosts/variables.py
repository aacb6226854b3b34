"""The variables of a scheduler, read with errors that name them."""

from collections.abc import Mapping

from drivetrain.errors import ConfigError

OVERRIDE = (
    "correct it, or give --nnodes, --node-rank and --rdzv-endpoint, with which no variables are "
    "read; --standalone stands for one host"
)


class Variables:
    """Environment variables by name.

    Args:
        environment: names and texts.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    def text(self, name: str) -> str:
        """Return a variable's text; "" when it is not set."""
        return self._environment.get(name, "")

    def first(self, *names: str) -> str:
        """Return the first name that is set, or the first of all."""
        return next((name for name in names if self.text(name)), names[0])

    def require(self, launcher: str, *names: str) -> None:
        """Check that variables are set.

        Raises:
            ConfigError: some are not.
        """
        missing = [name for name in names if not self.text(name)]
        if missing:
            there = [name for name in names if name not in missing]
            found = f"{', '.join(there)} alone" if there else "none of them"
            raise ConfigError(
                f"{launcher}: expected the variables {', '.join(names)}, found {found}; set "
                f"{', '.join(missing)}, or give --nnodes, --node-rank and --rdzv-endpoint"
            )

    def number(self, name: str, *, minimum: int = 0) -> int:
        """Return a variable's whole number.

        Raises:
            ConfigError: the text is something else.
        """
        text = self.text(name)
        if not text.isdecimal() or int(text) < minimum:
            raise ConfigError(
                f"the variable {name}: expected a whole number of at least {minimum}, found "
                f"{text!r}; {OVERRIDE}"
            )
        return int(text)

    def index(self, name: str, count_name: str) -> int:
        """Return an index below a count.

        Raises:
            ConfigError: the two variables contradict each other.
        """
        index, count = self.number(name), self.number(count_name, minimum=1)
        if index >= count:
            raise ConfigError(
                f"the variables {name}={index} and {count_name}={count} contradict each other: "
                f"expected an index from 0 to {count - 1}; {OVERRIDE}"
            )
        return index

    def shown(self, *names: str) -> str:
        """Return ``NAME=TEXT`` of variables that are set, for the user."""
        return ", ".join(f"{name}={self.text(name)}" for name in names if self.text(name))
