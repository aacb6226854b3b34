"""Where tensors live between their uses: host memory, or a file on a disk."""
