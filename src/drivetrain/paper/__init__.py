"""The step on paper: a strategy's work in one step, before anything runs.

================= =================================================================================
``work``          operations of kernels, and the units of a model: what is computed, kept, divided
``transformer``   a GPT by its sizes alone
``run``           what a strategy knows when it draws a step
``step``          the graph of tasks
``data_parallel`` draws the step of any kind of data parallelism
``lanes``         plays a step against prices: seconds, and the peak of memory
``trace``         a played step as a Chrome trace
================= =================================================================================
"""
