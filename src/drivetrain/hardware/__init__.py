"""Descriptions of hardware, and the prices of work on it.

=============== ===================================================================================
``description`` the file: devices, links by level, hosts, each number with its source
``catalog``     descriptions and peaks that come with the package, and files of one's own
``prices``      seconds of products, passes over memory and messages
=============== ===================================================================================
"""
