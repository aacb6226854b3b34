"""Compression: approximate sums and gathers over slow links between hosts.

Between hosts, gradients are summed and parameters are gathered by one rank of each host at a time
(``drivetrain.collectives.ring``). The option ``links.far`` names a method for each of the two;
strategies ask their communicator for a *channel*, a sum or gather of the same tensors time and
again, and the channel sends what the method makes of them. Activations between the stages of a
pipeline are no channel: the strategy that has the stages rounds them itself.

=====================  ==========================================================================
``compressor.py``      the contract of a method, a plugin of the group ``drivetrain.compressors``;
                       codes: their messages, their sums and gathers with error feedback, seeds
``communicator.py``    the communicator whose channels between hosts are approximate
``error_feedback.py``  errors, factors and counts: in channels, between them, in checkpoints
``methods.py``         the methods of a run, and the rule by which they are chosen
``automatic.py``       the methods of a run that leaves the choice to drivetrain; its figures
``one_bit_adam.py``    momenta of Adam in place of gradients, and steps with frozen variances
=====================  ==========================================================================
"""
