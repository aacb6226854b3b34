"""One module for each command, and the modules that commands share."""
