"""What a run measures of itself: a record for each optimizer step and rank, and where they lie."""
