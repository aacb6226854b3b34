"""Methods for slow links between hosts.

===============  ===================================================================
``compiled.py``  codes in C, compiled on the user's machine: ``blocks.c`` and ``topk.c``
``blocks.py``    blocks of integers with a scale each, or numbers rounded to half precision
``onebit.py``    signs with a scale per block
``powersgd.py``  matrices as two factors of low rank
``topk.py``      the largest numbers of each chunk
===============  ===================================================================

The sums of encoded gradients, their error feedback and the gathers of encoded parameters are
``drivetrain.compression``.
"""

from drivetrain_compression.blocks import Bf16, Int4, Int8
from drivetrain_compression.onebit import OneBit
from drivetrain_compression.powersgd import PowerSgd
from drivetrain_compression.topk import TopK

__all__ = ["Bf16", "Int4", "Int8", "OneBit", "PowerSgd", "TopK"]
