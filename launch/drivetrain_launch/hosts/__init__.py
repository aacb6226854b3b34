"""How a run comes to its hosts: recognised from a scheduler's variables."""
