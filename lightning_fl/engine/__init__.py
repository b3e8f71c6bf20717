"""The round of a federation, and what it stands on: cohorts, uploads, the server's side, prunings."""
