"""Pipeline schedules on paper: their simulation, the papers' formulas, and drawings.

============ ======================================================================================
``simulate`` runs a schedule without computing: time, idle time and memory, and promised times
``draw``     a Gantt chart on the terminal, or as a picture
``command``  ``drivetrain schedule``
============ ======================================================================================
"""
