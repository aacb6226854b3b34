"""The testing kit, for this project and for authors of plugins: ranks, awkward models, conformance.

Installing the distribution makes ``@pytest.mark.ranks(n)`` known to pytest (see ``plugin``).
"""
