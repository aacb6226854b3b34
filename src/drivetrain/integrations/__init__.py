"""Training loops of other libraries under our strategies; each needs its library installed."""
