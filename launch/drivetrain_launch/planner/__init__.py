"""What a layout will cost: its step on paper, priced and played, and the search for the best."""
