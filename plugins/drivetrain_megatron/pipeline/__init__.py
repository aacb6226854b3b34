"""Pipeline parallelism: stages of a model on ranks, micro-batches that pass through them.

From the model to its stages: ``examples`` and ``recording`` run it once on proxies (``proxy``),
``cut`` decides where stages begin, ``stages`` leaves each rank its own, ``build`` puts all
together.

From a call to a step: ``engine`` chooses the level (``whole``, ``window``, ``promised``),
``actions`` and ``schedules`` say what a rank does in which order, ``interpreter`` does it with
``worker`` and ``transfer``.

On paper: ``simulate``, ``formulas``, ``draw``, ``trace`` and ``command`` (``drivetrain schedule``).
"""
