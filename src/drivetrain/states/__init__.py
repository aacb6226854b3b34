"""The state of optimizers and models as one process has it, where ranks divide the parameters.

======  ========================================================================================
whole   an optimizer: its groups as the script made them, its whole state, what scripts find there
copies  of a model's whole tensors, as exports and its own ``save_pretrained`` read them
======  ========================================================================================
"""
