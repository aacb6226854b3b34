"""The user's model looked at without values: its blocks, their calls, where each tensor comes from.

Whoever plans reads one look (``drivetrain.model``), and runs nothing. From the bottom:

================= =================================================================================
``proxy``         the tensor without values, which may get its value later
``structure``     the result of a block, as a tree
``units``         the modules that count as blocks
``crossing``      the tensors that cross each bound between blocks
``hooked``        tensors inside of blocks that hooks collect
``phases``        blocks in order, and which parameters are used where
``around_blocks`` functions of torch that the code around blocks calls
``block_facts``   the facts of the tensors that one block makes
``shapes``        the shapes that blocks return for given inputs
``calls``         example inputs, the look with them, and the first arguments of each block
================= =================================================================================
"""
