"""Methods whose clients keep parts of the model, or models of their own."""
