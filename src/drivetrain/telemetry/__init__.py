"""The figures of a run: a record for each optimizer step and rank, and the files of all records."""
