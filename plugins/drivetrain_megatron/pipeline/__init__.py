"""Pipeline parallelism: stages of a model on ranks, micro-batches that pass through them.

From the model to its stages: ``cut`` decides where stages begin, ``stage`` leaves each rank its
own and gives the others' place to proxies (``recording.proxy``), ``build`` puts all together.

From a call to a step: ``build`` chooses the level, by the place where the loss is made
(``losses``), as ``trials`` allow; ``schedules`` order the actions of ranks; ``runner`` carries them
out on each stage, and ``transfer`` cuts micro-batches and sends. ``command`` is ``drivetrain
schedule``: a schedule run without computing, its time, idle time and memory, and its chart.
"""
