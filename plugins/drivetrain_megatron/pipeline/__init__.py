"""Pipeline parallelism: stages of a model on ranks, micro-batches that pass through them.

From the model to its stages: ``cut`` decides where stages begin, ``stages`` leaves each rank its
own and gives the others' place to proxies (``other_stages``), ``build`` puts all together.

From a call to a step: ``levels`` chooses the level, by the place where the ``loss`` is made;
``schedules`` order the actions of ranks; ``local`` carries them out with each stage's ``worker``
(computes) and ``transfer`` (sends), on micro-batches (``batches``). ``timeline`` and ``timing``
write down when.
"""
