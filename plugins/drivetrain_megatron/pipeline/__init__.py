"""Pipeline parallelism: stages of a model on ranks, micro-batches that pass through them.

==================== ================================================================
actions.py           what a rank computes, as data
schedules.py         in which order: GPipe, 1F1B, interleaved 1F1B, ZB-H1
simulate.py          runs a schedule on paper: its time, idle time and memory
formulas.py          the times that the papers promise
draw.py              a run, on paper or measured, as a chart on the terminal or as a picture
trace.py             the same as a Chrome trace
command.py           ``drivetrain schedule``
==================== ================================================================
"""
