"""The control plane: who is in the fleet, what it may do, and what it works on; behind one API."""
