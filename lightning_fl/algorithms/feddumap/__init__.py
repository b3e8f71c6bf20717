"""FedDUMAP's parts FedDU, FedDUM and FedAP, and the methods that its paper compares them with."""
