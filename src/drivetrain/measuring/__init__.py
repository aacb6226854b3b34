"""Measures devices, memories, links and disks of a run's ranks, for a description of hardware.

=============== ===================================================================================
``clock``       medians and scatter of repeated timings
``device``      products by size and dtype, passes over memory, starts of kernels, their kinds
``links``       pairs of ranks, rings, the levels of the topology
``__main__``    the program that every rank runs, and the file that it writes for plans
=============== ===================================================================================
"""
