"""FedAdam with sparse or quantised uploads: FedAdam-SSM and the methods that its paper compares it with."""
