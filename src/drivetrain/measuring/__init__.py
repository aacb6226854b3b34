"""Measures devices, memories, links and disks of a run's ranks, for a description of hardware.

=============== ===================================================================================
``clock``       medians and scatter of repeated timings
``device``      products by size and dtype, passes over memory, starts of kernels
``links``       pairs of ranks, rings, the levels of the topology
``description`` the file that plans read, with what was measured and how far it scattered
``__main__``    the program that every rank runs
=============== ===================================================================================
"""
