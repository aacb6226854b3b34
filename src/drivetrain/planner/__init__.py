"""The cost of a layout: its step on paper, priced and played, and the search for the best."""
