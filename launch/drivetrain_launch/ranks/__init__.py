"""The ranks of this host: where they go, how they meet, run, fail and end."""
