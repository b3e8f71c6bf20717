"""FedDUMAP's parts FedDU, FedDUM and FedAP, and the baselines in its paper."""
