"""Descriptions of hardware, measurements for them, and the prices of work on it.

=============== ===================================================================================
``description`` the file: devices, links by level, hosts; those that come with the package
``sizes``       sizes as users type and read them
``prices``      seconds of products, passes over memory and messages
``clock``       medians and scatter of repeated timings
``measure``     devices, pairs of ranks, rings, a disk: for a description of one's own
=============== ===================================================================================
"""
