"""The user's model looked at without values: its blocks, their calls, what follows from what.

Whoever plans reads one look (``drivetrain.model``), and runs nothing. From the bottom:

============= =====================================================================================
``lazy``      expressions over tensors that another stage will send
``proxy``     the tensor without values, which may get its value later
``structure`` what a block returns, as a tree
``phases``    blocks in order, and which parameters are used where
``shapes``    the shapes that blocks return for given inputs
``examples``  example inputs of a model that nobody has called yet, and the look with them
``calls``     the arguments of the first call of each block
============= =====================================================================================
"""
