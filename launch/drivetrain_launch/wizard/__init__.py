"""The wizard: questions, the proposed strategy, and the dialog on a terminal."""
