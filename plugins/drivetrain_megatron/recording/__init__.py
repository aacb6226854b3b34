"""The user's model looked at without values: its blocks, their calls, what follows from what.

A forward runs on proxies, tensors with a shape and no values; nothing is computed. From the bottom:

================= =================================================================================
``shapes_of_ops`` what an operation would give, worked out from shapes alone
``lazy``          expressions over tensors that another stage will send
``uses``          functions of torch that read a tensor, write it, or ask for facts
``refusals``      errors where a tensor would need its values
``proxy``         the tensor without values
``substitution``  lets a model run with proxies for parameters
``block_hooks``   stands before every block and asks what a call of it does
``structure``     what a block returns, as a tree
``recorder``      blocks in order, and which parameters are used where
``shapes``        the shapes that blocks return for given inputs
``examples``      example inputs of a model that nobody has called yet
``calls``         the arguments of the first call of each block
================= =================================================================================
"""
