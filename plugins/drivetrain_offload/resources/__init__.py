"""Memory and threads of the host, as stores and steps need them."""
