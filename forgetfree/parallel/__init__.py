"""Training on several processes: numbered parts of a batch, the exchange of sums, models whose tensors are sharded."""
