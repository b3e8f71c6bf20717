"""Image data sets as federated data modules."""
