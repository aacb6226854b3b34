"""Methods for slow links between hosts.

===============  ===================================================================
``codes.py``     blocks of integers or signs with a scale each, bfloat16, the largest numbers;
                 in C, too, compiled on the user's machine: ``blocks.c`` and ``topk.c``
``powersgd.py``  matrices as two factors of low rank
===============  ===================================================================

The sums of encoded gradients, their error feedback and the gathers of encoded parameters are
``drivetrain.compression``.
"""
