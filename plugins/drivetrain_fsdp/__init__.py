"""FSDP: parameters divided row by row, gathered and freed in units."""
