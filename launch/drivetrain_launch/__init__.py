"""The ``drivetrain`` command: it knows the configuration and the registry, never a strategy."""
