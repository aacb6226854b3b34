"""Hosts checked before a run over several of them: software, ways between all pairs, clocks."""
