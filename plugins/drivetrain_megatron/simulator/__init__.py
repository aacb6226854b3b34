"""Pipeline schedules on paper: their simulation, the papers' formulas, and drawings.

============ ======================================================================================
``simulate`` runs a schedule without computing: time, idle time and memory, and promised times
``command``  ``drivetrain schedule``: a Gantt chart on the terminal, or as a picture
``step``     the step of a cell, for plans
============ ======================================================================================
"""
