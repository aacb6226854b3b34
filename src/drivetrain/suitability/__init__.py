"""Whether the optimizers and layers of a script fit what ranks do with them."""
