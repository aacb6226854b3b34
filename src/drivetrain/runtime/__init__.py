"""The parts of every run, under every strategy: world, mesh, precision, randomness."""
