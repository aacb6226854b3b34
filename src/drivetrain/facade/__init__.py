"""The collaborators of the Accelerator, one idea a file; ``drivetrain.accelerator`` holds them."""
