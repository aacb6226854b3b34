"""The state of optimizers and models as one process has it, where ranks divide the parameters.

=========  ========================================================================================
given      the groups of parameters as the script made them
exchange   whole state from the ranks' shares, and shares from whole state
views      what scripts find under ``optimizer.state`` and in ``optimizer.param_groups``
whole      an optimizer with all of these
copies     of a model's whole tensors, as exports and its own ``save_pretrained`` read them
=========  ========================================================================================
"""
