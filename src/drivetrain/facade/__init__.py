"""What the Accelerator is made of: one idea a file, put together in ``drivetrain.accelerator``."""
