"""The user's model looked at without values: its blocks, their calls, where each tensor comes from.

Whoever plans reads one trace (``drivetrain.model``), and runs nothing. From the bottom:

========== =======================================================================================
``proxy``  the tensor without values, which may get its value later; parameters of other stages
``phases`` blocks in order, which parameters are used where, and the tensors that cross each bound
``shapes`` the shapes that blocks return for given inputs
``calls``  example inputs, the trace with them, and the first arguments of each block
========== =======================================================================================
"""
