"""Which layers of a model are divided: guessed from its structure, and tried.

================ ==================================================================================
``thread_ranks`` ranks as threads of one process, to try a plan before a rank is started
``groups``       layers that can be divided together, and the ways to try them
``own_weights``  weights without a layer, such as those of experts, and the ways to try them
``alike``        the plan of one expert, for the other experts of a list
``divide``       divides one block as a plan says
``random_copy``  copies a model for a trial, with thin matrices in place of large ones
``trial``        compares the divided block with the whole one, in numbers
``misfit``       holds a plan against the shapes of the block as it is
``derive``       proposes plans for a block, and keeps a plan that gives equal numbers
``named``        plans in words: the user's and Hugging Face's, and whether each was fulfilled
``vocabulary``   finds the layers outside of blocks that are divided by words
``model``        divides a whole model
``whole_trial``  compares the divided model with one process, and keeps what gives equal numbers
``report``       says in a few lines how a model was divided
================ ==================================================================================
"""
