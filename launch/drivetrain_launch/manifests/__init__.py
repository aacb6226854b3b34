"""Job files of schedulers, written for one configuration."""
