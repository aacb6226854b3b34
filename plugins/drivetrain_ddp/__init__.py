"""Data parallelism: every rank holds the whole model and sees its own part of the batch.

Paper: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
VLDB 2020. The idea in five lines:

1. All ranks start from rank 0's parameters and compute gradients of their own micro-batch.
2. Gradients are views of flat buckets; autograd's fresh gradient is moved in by one copy.
3. A bucket whose gradients are all there starts its all-reduce while backward goes on.
4. The first synchronised backward observes in which order gradients come; buckets follow it.
5. At the end buckets with missing gradients are sent with zeros, so ranks send the same buckets.

With P parameters of b bytes, N ranks: sent per rank and optimizer step 2 (N-1)/N b (P + number of
parameters), received the same; held: parameters, gradients and optimizer state, all whole. The
trailing element of each parameter tells all ranks whether any rank had a gradient for it.

==================== ================================================================
options.py           the options, and what may be set together
strategy.py          ``Ddp``: the contract, bytes held and sent; buckets (steps 2-5), which cross
                     whole, in half precision, or of low rank
==================== ================================================================
"""
