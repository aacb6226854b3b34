"""Pipeline parallelism: stages of a model on ranks, micro-batches that pass through them.

From the model to its stages: ``cut`` decides where stages begin (``profile`` measures blocks for
it), ``stages`` leaves each rank its own and gives the others' place to proxies (``other_stages``,
``ties``), ``build`` puts all together.

From a call to a step: ``levels`` chooses the level, by how the ``loss`` is made; ``actions`` and
``schedules`` say what a rank does in which order; ``local`` has the rank's stages, ``interpreter``
does what the schedule says with ``worker`` (computes, with ``weights`` later) and ``transfer``
(sends), on micro-batches (``batches``). ``timeline`` and ``timing`` write down when it was done.
"""
