"""The engine that data-parallel strategies share: state divided in units, or replicated.

A unit is a set of parameters that are gathered and freed together. A strategy says how a model is
cut into units, what each rank owns of a parameter, and what happens at each event of a step. The
mechanisms that it calls are here, from the bottom up:

==================== ==============================================================================
layout.py            which parameter lies where, who owns what: arithmetic
unit.py              flat tensors that are gathered by one all-gather, and freed together; this
                     rank's part of each between its uses
estimate.py          bytes held and sent, and what plans need to know
options.py           the options that strategies share
optimizer_backend.py where shards lie and who steps them: beside the model, or elsewhere
placement.py         the ranks of a model, and its parameters in units
gather.py            when units are gathered and freed, by the hooks of a step
gradients.py         one unit's gradients, from autograd to fragments; what stands at ``p.grad``
reduce.py            when units are reduced during backward, and what a script did to gradients
optimizers.py        fragments in the place of parameters in optimizers
strategy.py          the contract of strategies over units: the step in its order, checkpoints
replicated.py        the contract where every rank holds all state whole, but for the average;
                     buckets: gradients side by side in one flat tensor
backward.py          where a synchronised backward begins and ends; norms of many tensors
whole_state.py       optimizers and models as one process has them
suitability.py       whether an optimizer or a layer fits what ranks do with it, by experiment
==================== ==============================================================================
"""
