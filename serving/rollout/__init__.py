"""Another model, under load: deployed at once, shadowed, or as a canary that goes up step by step and comes back by itself."""
