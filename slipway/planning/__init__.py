"""What a training will take, predicted before anything is spent, and values to begin with."""
