"""Sharded units: parameters, gradients and optimizer states divided among ranks, unit by unit.

A unit is a set of parameters that are gathered and freed together. A strategy says how a model is
cut into units, what each rank owns of a parameter, and what happens at each event of a step. The
mechanisms that it calls are here, from the bottom up:

============= ==================================================================
layout.py     which parameter lies where, who owns what: arithmetic, one parameter's geometry
shard.py      this rank's part of a flat tensor between its uses
unit.py       flat tensors that are gathered by one all-gather, and freed together
estimate.py   bytes held and sent, and what plans need to know
options.py    the options that strategies share
home.py       where shards lie and who steps them: beside the model, or elsewhere
placement.py  the ranks of a model, and its parameters in units
gather.py     when units are gathered and freed; parameters used while values are away
gradients.py  one unit's gradients, from autograd to fragments
reduce.py     when units are reduced during backward
hooks.py      the events of a step
optimizers.py fragments in the place of parameters in optimizers
state.py      checkpoints
strategy.py   the contract, but for the step
============= ==================================================================
"""
