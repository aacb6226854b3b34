"""Which layers of a model are divided: guessed from its structure, and tried.

================ ==================================================================================
``thread_ranks`` ranks as threads of one process, to try a plan before a rank is started
``groups``       layers that can be divided together, and the ways to try them
``divide``       divides one block as a plan says
``trial``        compares the divided block with the whole one, in numbers
``derive``       proposes plans for a block, and keeps a plan that gives equal numbers
``named``        plans in words: the user's and Hugging Face's, and whether each was fulfilled
``vocabulary``   finds the layers outside of blocks that are divided by words
``model``        divides a whole model
``report``       says in a few lines how a model was divided
================ ==================================================================================
"""
