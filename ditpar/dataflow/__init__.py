"""Row partitions and deferred tensors: what is computed where, and when."""
