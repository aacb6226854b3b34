"""Leaves that strategies are built from: buckets, norms, rounds, guard, pool, names, blocks."""
