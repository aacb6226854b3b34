"""The report of a run: pages, pictures and summaries made of the records in its folder."""
