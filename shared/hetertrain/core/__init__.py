"""The state machines of training, and the algebra that merges: pure, with time as an argument."""
