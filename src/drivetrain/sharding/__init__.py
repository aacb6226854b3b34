"""Sharded units: parameters, gradients and optimizer states divided among ranks, unit by unit.

A unit is what is gathered and freed together. Strategies say how a model is cut into units and
what each rank owns of a parameter; the rest is here.

===================== =============================================================
layout.py             which parameter lies where, who owns what: arithmetic
ranks.py              who shares a model: everyone, those who divide it, replicas
placement.py          a model's parameters into units, whole or built on meta
slot.py, flat.py      one parameter; the parameters of one kind, side by side
unit.py               gathered by one all-gather, freed together
flat_gradients.py     where gradients arrive, and what is kept of them
gradients.py          one unit's gradients: one reduce-scatter
reducer.py            when units are reduced during backward
gathering.py          when units are gathered and freed
order.py              which unit usually follows which
saving.py             what autograd saves: views without values
module_units.py       the hooks of modules that units belong to
hooks.py              hooks that copies of the model do not inherit
absent.py             what is used while its values are away
binding.py            fragments in the place of parameters in optimizers
suitability.py        whether an optimizer may step fragments
surgery.py            changes to whole parameters
state.py              checkpoints
uses.py               how often units are gathered
estimate.py           bytes held and sent
options.py            the options that strategies share
accounts.py           the promise of a strategy over units
strategy.py           the contract: what all strategies over units do
divided.py            and what those do whose parameters come and go
===================== =============================================================
"""
