"""Megatron: tensor, sequence and pipeline parallelism for an unmodified model.

Ranks that share one replica are a cell. Its tensor-parallel ranks divide the layers of a block
(Shoeybi et al. 2019, arXiv 1909.08053; Korthikanti et al. 2022, arXiv 2205.05198), its pipeline
ranks divide the blocks (Narayanan et al. 2021, arXiv 2104.04473; Qi et al. 2023, arXiv 2401.10241).
The parameters that are left on a rank are trained by any data-parallel strategy, found by name.

A folder of this table imports only the folders above it:

============= =====================================================================================
``recording`` the model looked at without values: example inputs, blocks, stand-ins of tensors
``tensor``    layers, operators and losses that compute with a rank's share
``plan``      which layers are divided: guessed from the structure, and tried
``pipeline``  stages, schedules, and the script's loop over them; schedules on paper: simulation,
              formulas, charts, the command ``schedule``
============= =====================================================================================

``strategy`` is the contract, ``config`` its options, ``state`` the data-parallel strategy inside
and the way between a rank's tensors and the whole model's, ``shares`` what a script finds
under the names of divided parameters, ``dropout`` masks that are equal wherever activations are
equal, ``cost`` the promised bytes: a rank holds 1/tp of every divided tensor, and the tensors of
its stages only; ``step`` the simulated step.
"""
