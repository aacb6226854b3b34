"""The launcher's watch over its ranks: who stands still, where, and who waits for whom."""
