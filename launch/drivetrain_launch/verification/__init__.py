"""The work of ``drivetrain verify``: runs of a script in processes, and their comparison."""
