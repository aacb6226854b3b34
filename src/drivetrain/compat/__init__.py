"""Scripts written for Accelerate as they are: their ``import accelerate`` finds drivetrain.

``drivetrain launch --as-accelerate train.py`` and ``python -m drivetrain.compat train.py`` run such
a script. ``importing`` decides which modules are the user's, ``names`` which object a name stands
for.
"""
