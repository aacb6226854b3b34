"""The simulator: a strategy's work in one step, drawn before anything runs.

================= =================================================================================
``step``          operations of kernels, units of a model, and the graph of tasks: played against
                  prices, it has seconds, the peak of memory, and a trace
``contract``      what plans ask of a strategy; the step of any kind of data parallelism
``transformer``   a GPT by its sizes alone
``traced``        a model's units from traces of the module itself
================= =================================================================================
"""
