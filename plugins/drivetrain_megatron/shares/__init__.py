"""What a script finds under the names of parameters of which each tensor-parallel rank has a share.

==============  ==============================================================================
``share``       one parameter: a share where the model computes, the whole everywhere else
``whole``       whole values in a script's hands: what it writes into them goes to the shares
``gradient``    the place of the share at ``p.grad``
``hooks``       a script's hooks on it
``parameters``  all parameters of a model, and who finds shares in them
==============  ==============================================================================
"""
