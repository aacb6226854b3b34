"""The cost of a layout: its simulated step, priced and played, and the search for the best."""
