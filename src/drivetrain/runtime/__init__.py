"""What every run has, whatever its strategy: world, mesh, precision, randomness, data."""
