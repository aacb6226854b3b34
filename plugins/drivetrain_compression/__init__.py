"""Methods for slow links between hosts.

===============  ===================================================================
``compiled.py``  codes in C, compiled on the user's machine: ``blocks.c`` and ``topk.c``
``codes.py``     blocks of integers or signs with a scale each, bfloat16, the largest numbers
``powersgd.py``  matrices as two factors of low rank
===============  ===================================================================

The sums of encoded gradients, their error feedback and the gathers of encoded parameters are
``drivetrain.compression``.
"""
