"""Rules of methods whose clients keep models, or parts of them, of their own."""
