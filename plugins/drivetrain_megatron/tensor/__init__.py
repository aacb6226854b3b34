"""Tensor parallelism: each rank computes with its share of the heads, features and vocabulary.

Shoeybi et al. 2019 (arXiv 1909.08053) cut a block's first matrix by columns and the second by rows,
so that nothing need be sent between them; Korthikanti et al. 2022 (arXiv 2205.05198) cut
activations between the blocks along the sequence (sequence parallelism). From the bottom:

============== ===================================================================================
``partition``  which ranges of a dim each rank holds
``operators``  the conjugate pairs: a collective in forward, its counterpart in backward
``behavior``   gives one module another forward, and takes it away again; parts of a block whose
               weights are in no layer, and code that counts with sizes
``vocabulary`` embeddings and logits cut by words, and the loss of such logits
``linear``     layers cut by columns or by rows, of torch and of Hugging Face
``attention``  ``nn.MultiheadAttention`` on local heads
============== ===================================================================================

Bytes that one rank sends per micro-batch, A being the bytes of one activation and t the ranks: a
block of attention or of an MLP costs 4 A (t - 1) / t, with and without sequence parallelism; an
embedding cut by words 2 A (t - 1) / t in forward; the loss three all-reduces of one number a token.
"""
