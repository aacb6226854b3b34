"""Simulated pipeline schedules: their timelines, the papers' formulas, and drawings.

============ ======================================================================================
``command``  a schedule run without computing: time, idle time and memory; ``drivetrain
             schedule``: a Gantt chart on the terminal, or as a picture
``step``     the step of a cell, for plans
============ ======================================================================================
"""
