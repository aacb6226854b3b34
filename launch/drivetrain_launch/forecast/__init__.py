"""A run before anything starts: its mistakes, its mesh, and the bytes that strategies promise."""
