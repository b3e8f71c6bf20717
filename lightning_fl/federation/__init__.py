"""One round: the cohort, the uploads, the server's steps, the loss guard, and how a federation follows a pruning."""
