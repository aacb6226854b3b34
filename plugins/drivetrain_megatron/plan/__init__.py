"""Which layers of a model are divided: guessed from its structure, and tried.

================ ==================================================================================
``divide``       divides one block as a plan says
``trial``        compares the divided block with the whole one, in numbers, on thin copies, by ranks
                 that are threads of one process
``derive``       finds layers and weights that can be divided together, proposes plans for a block,
                 and keeps a plan that gives equal numbers
``named``        plans in words: the user's and Hugging Face's, and whether each was fulfilled
``model``        divides a whole model, also by words, compares it with one process, says how
================ ==================================================================================
"""
