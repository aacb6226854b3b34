"""The simulator: a strategy's work in one step, drawn before anything runs.

================= =================================================================================
``work``          operations of kernels, and the units of a model: what is computed, kept, divided
``transformer``   a GPT by its sizes alone
``run``           what a strategy knows when it draws a step
``step``          the graph of tasks, played against prices: seconds, the peak of memory, a trace
``data_parallel`` draws the step of any kind of data parallelism
================= =================================================================================
"""
