"""A user's model: traced without values, constructed without memory, and its modules at work.

============== ====================================================================================
``trace``       one forward without values, and its record: operations, calls of modules and blocks
``valueless``   the tensors of that pass, which have a shape and no values
``untouched``   lets code run on a model that must leave no trace, or that has no values
``deferred``    construction without memory: values come when they are needed
``modules``     names outside of a run, another forward for a module, repeated blocks, compiled
``guard``       parameters whose values are elsewhere, or on their way
``recompute``   blocks that forget their intermediate values and compute them again in backward
============== ====================================================================================
"""
