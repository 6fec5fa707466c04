"""Pure functions on tensors: advantages, losses, KL estimators, packing. Needs torch."""
