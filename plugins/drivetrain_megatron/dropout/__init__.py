"""Dropout masks by counting: equal where activations are equal, however ranks share the model.

Whether an element is kept is a hash of a key and of its global index (counter-based random numbers:
Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

============ ======================================================================================
``masks``    the hash
``dropouts`` where a model drops elements, and how the ranks divide a dropout's input
``chain``    the key of every dropout of a forward, and the modules with these dropouts
``draws``    all other random numbers: the same on the ranks that share layers
============ ======================================================================================
"""
