"""How the launcher sees that ranks do well: their times, gathered and compared."""
