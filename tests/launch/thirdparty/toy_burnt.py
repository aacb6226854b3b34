"""A stranger's module that cannot be imported."""

raise RuntimeError("the toaster is on fire")
