"""Evaluation of the server's model and of the clients'."""
