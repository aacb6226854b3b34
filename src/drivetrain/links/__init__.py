"""Approximate sums of gradients, and gathers of parameters, over slow links between hosts.

Between hosts, gradients are summed and parameters are gathered by one rank of each host at a time
(``drivetrain.collectives.hierarchy``). The option ``links.far`` names a method for each of the two;
strategies ask their communicator for a *channel*, a sum or gather of the same tensors time and
again, and the channel sends what the method makes of them. Activations between the stages of a
pipeline are no channel: the strategy that has the stages rounds them itself.

===================  ============================================================================
``compressor.py``    the contract of a method, a plugin of the group ``drivetrain.compressors``
``codec.py``         methods that turn numbers into bytes: their messages
``encoded.py``       sums and gathers of such messages, with error feedback
``linked.py``        the communicator whose channels between hosts are approximate
``seeds.py``         seeds of sums whose numbers are rounded by chance
``awaited.py``       one of its channels before the method is chosen
``warmed.py``        one of its channels: exact at first, and able to take a step back
``parked.py``        what channels that were given up leave to those that come
``kept.py``          checkpoints of errors, factors and counts
``chosen.py``        the methods of a run
``automatic.py``     the methods of a run that leaves the choice to drivetrain
``resumed.py``       their choice in a checkpoint
``rule.py``          the rule by which these are chosen
``figures.py``       what the rule needs to know: the rate between hosts, the time of encodings
``one_bit_adam.py``  momenta of Adam in place of gradients, and steps with frozen variances
===================  ============================================================================
"""
