"""Tensor parallelism: each rank computes with its share of the heads, features and vocabulary.

Shoeybi et al. 2019 (arXiv 1909.08053) cut a block's first matrix by columns and the second by rows,
so that nothing need be sent between them; Korthikanti et al. 2022 (arXiv 2205.05198) cut
activations between the blocks along the sequence (sequence parallelism). From the bottom:

================= =================================================================================
``partition``     which ranges of a dim each rank holds
``operators``     the conjugate pairs: a collective in forward, its counterpart in backward
``behavior``      gives one module of the user another forward, and takes it away again
``weight_grad``   the gradient of a layer's weight, perhaps later than that of its input
``products``      matrix products with collectives inside of them
``shared_input``  layers that share an input, which enters once, overlapped
``embedding``     embeddings cut by words
``cross_entropy`` the loss of logits that are cut over the vocabulary
``writing``       which tensors a call of torch writes into
``logits``        the tensor that a head cut over the vocabulary returns
``once``          gradients that cannot be differentiated again
``linear``        layers cut by columns or by rows, of torch and of Hugging Face
``alone``         layers that are divided by themselves
``region``        the ends of a part of a block whose weights are in no layer
``attention``     ``nn.MultiheadAttention`` on local heads
``local_sizes``   reshapes by code that counts with the sizes of the whole
================= =================================================================================

Bytes that one rank sends per micro-batch, A being the bytes of one activation and t the ranks: a
block of attention or of an MLP costs 4 A (t - 1) / t, with and without sequence parallelism; an
embedding cut by words 2 A (t - 1) / t in forward; the loss three all-reduces of one number a token.
"""
