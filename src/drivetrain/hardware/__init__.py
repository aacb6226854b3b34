"""Descriptions of hardware, and the prices of work on it.

=============== ===================================================================================
``description`` the file: devices, links by level, hosts, each number with its source
``catalog``     the descriptions that come with the package, and files of one's own
``peaks``       the published peak of a device, by its name
``prices``      seconds of products, passes over memory and messages
=============== ===================================================================================
"""
