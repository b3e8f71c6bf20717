"""Shapes of the parameters of a CNN with 21,840 of them, and of a network with 109, for compression by layers."""

CNN = {
    "conv1": (10, 1, 5, 5),
    "bias1": (10,),
    "conv2": (20, 10, 5, 5),
    "bias2": (20,),
    "fc1": (50, 320),
    "bias3": (50,),
    "fc2": (10, 50),
    "bias4": (10,),
}
SMALL = {"conv": (4, 3, 2, 2), "bias": (4,), "thin": (1, 9), "fc": (6, 8)}
